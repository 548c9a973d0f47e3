"""A task for GRPO on a chat model: a definition in one short sentence.

    python recipes/brief.py FOLDER     # train.jsonl, valid.jsonl

A prompt asks what a thing is. The reward of an answer is 0 if it does not name the thing or does
not end a sentence. Else it is 1 for six to eight words, and less for fewer and for more: without
the lower bound a model learns to answer "A lamp." alone.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

THINGS = (
    "lamp", "river", "bridge", "hammer", "violin", "camera", "desert", "island", "kitchen", "library",
    "market", "mirror", "museum", "needle", "ocean", "pencil", "planet", "pillow", "rocket", "school",
    "shadow", "spider", "storm", "teacher", "temple", "theater", "tiger", "train", "umbrella", "valley",
    "village", "volcano", "wallet", "window", "winter", "apple", "balloon", "basket", "bicycle",
    "blanket", "bottle", "butter", "button", "candle", "carpet", "castle", "chair", "cheese", "clock",
    "cloud", "coffee", "compass", "computer", "diamond", "doctor", "dragon", "eagle", "engine",
    "farmer", "feather", "flower", "forest", "garden", "guitar", "helmet", "honey", "horse", "hospital",
    "insect", "jacket", "jungle", "kettle", "knife", "ladder", "lemon", "lion", "magnet", "monkey",
)  # fmt: skip
WORDINGS = ("Answer in one short sentence: what is a {}?", "In at most eight words, what is a {}?")
VALID = 16
FEWEST, MOST = 6, 8


def reward(prompts: list, completions: list, thing: list[str], **columns: object) -> list[float]:
    """Per completion, a list of one message, how well its length fits."""
    return [brevity(one[0]["content"], name) for one, name in zip(completions, thing, strict=True)]


def brevity(answer: str, thing: str) -> float:
    text = answer.strip()
    if thing not in text.lower() or not text.endswith((".", "!", "?")):
        return 0.0
    count = len(text.split())
    return min(1.0, count / FEWEST, MOST / count)


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    folder, draw = Path(sys.argv[1]), random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    things = draw.sample(THINGS, len(THINGS))
    for name, part in (("train", things[VALID:]), ("valid", things[:VALID])):
        rows = [(thing, wording.format(thing)) for thing in part for wording in WORDINGS]
        draw.shuffle(rows)
        lines = [
            json.dumps({"prompt": [{"role": "user", "content": text}], "thing": thing})
            for thing, text in rows
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{folder / name}.jsonl has {len(lines)} prompts")


if __name__ == "__main__":
    main()
