"""A task that a fine-tuned model solves and its base does not: orders in a sentence become JSON.

    python recipes/orders.py data FOLDER              # train.jsonl, valid.jsonl, test.jsonl
    python recipes/orders.py score FOLDER MODEL [--lora DIR]

The sentences of valid.jsonl and test.jsonl are worded in ways that train.jsonl does not have. An
answer counts if it is the order's JSON, character for character.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from rooflax import LLM

NAMES = (
    "Anna", "Ben", "Carla", "David", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kira",
    "Leo", "Maya", "Nils", "Olga", "Paulo", "Rosa", "Samir", "Tess", "Viktor",
)  # fmt: skip
CITIES = (
    "Oslo", "Lisbon", "Cairo", "Lima", "Quito", "Turin", "Delhi", "Kyoto", "Perth", "Dublin",
    "Boston", "Prague", "Accra", "Hanoi", "Vienna",
)  # fmt: skip
ITEMS = (
    "apples", "lamps", "books", "chairs", "cups", "pens", "boxes", "shirts", "plates", "clocks",
    "bags", "tables", "bottles", "mirrors", "carpets",
)  # fmt: skip
TRAINED = (
    "{name} from {city} wants {count} {item}.",
    "Please send {count} {item} to {name} in {city}.",
    "{name} ordered {count} {item}; deliver them to {city}.",
    "To {city}: {count} {item} for {name}.",
    "I am {name}, I live in {city} and I need {count} {item}.",
    "{count} {item} go to {city}, and {name} pays.",
    "A customer in {city}, {name}, asked for {count} {item}.",
    "{name} ({city}) - {count} {item}",
    "We sold {count} {item} to {name}, who lives in {city}.",
    "Ship {name}'s {count} {item} to {city}.",
)
HELD_OUT = (
    "In {city} there is {name}, who would like {count} {item}.",
    "For {name} in {city} we pack {count} {item}.",
    "{city} again: {name} needs another {count} {item}.",
    "Could you bring {count} {item} to {city}? They are for {name}.",
)


def conversations(seed: int, count: int, wordings: Sequence[str]) -> Iterator[dict]:
    """Questions with their answers, as chat messages."""
    draw = random.Random(seed)
    for _ in range(count):
        order = {
            "name": draw.choice(NAMES), "item": draw.choice(ITEMS), "count": draw.randint(2, 99),
            "city": draw.choice(CITIES),
        }  # fmt: skip
        question = "Write this order as JSON. " + draw.choice(wordings).format(**order)
        yield {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": json.dumps(order)},
            ]
        }


def write_data(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    parts = (("train", 1200, TRAINED), ("valid", 60, HELD_OUT), ("test", 100, HELD_OUT))
    for seed, (name, count, wordings) in enumerate(parts):
        lines = (json.dumps(one) + "\n" for one in conversations(seed, count, wordings))
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def score(folder: Path, model: str, lora: str | None) -> tuple[int, int]:
    """Right answers to test.jsonl, greedily, and how many there are."""
    lines = (folder / "test.jsonl").read_text(encoding="utf-8").splitlines()
    questions, answers = zip(*(json.loads(line)["messages"] for line in lines), strict=True)
    llm = LLM(model, lora=lora, max_num_seqs=16, max_model_len=256)
    prompts = [llm.encode_chat([question]) for question in questions]
    found = llm.generate(prompts, temperature=0.0, max_tokens=48)
    return sum(
        one.text.strip() == answer["content"] for one, answer in zip(found, answers, strict=True)
    ), len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    data, scored = verbs.add_parser("data"), verbs.add_parser("score")
    for verb in (data, scored):
        verb.add_argument("folder", type=Path)
    scored.add_argument("model")
    scored.add_argument("--lora", help="an adapter's folder")
    args = parser.parse_args()
    if args.verb == "data":
        write_data(args.folder)
    else:
        right, count = score(args.folder, args.model, args.lora)
        print(f"{right} of {count} answers are right.")


if __name__ == "__main__":
    main()
