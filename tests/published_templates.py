"""Published chat templates: our text equals that of transformers' apply_chat_template.

    python -m tests.published_templates FOLDER

FOLDER has files *.jinja, such as `models/templates` of llama.cpp's tree, which is in the source
distribution of llama-cpp-python. Each is rendered with one turn, several turns, a system prompt,
reasoning, tools, calls and their results, with and without the beginning of an answer. Where
transformers cannot render a conversation, ours must not either.
"""

import itertools
import sys
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from rooflax.errors import RooflaxError
from rooflax.loading.chat_template import render

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather at a place, 'now' & \"then\", naïve",
            "parameters": {
                "type": "object",
                "required": ["place"],
                "properties": {
                    "place": {"type": "string", "description": "where"},
                    "days": {"type": "integer", "enum": [1, 7]},
                },
            },
        },
    }
]


def _call(number: int, place: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": {"place": place, "days": number}}
    return {"id": f"call0000{number}", "type": "function", "function": function}


USER = {"role": "user", "content": " 日本語 😀 <b> & 'q'\n"}
SYSTEM = {"role": "system", "content": "Be brief. "}
ANSWER = {"role": "assistant", "content": "Hi!\n\n"}
THOUGHT = {"role": "assistant", "content": "yes", "reasoning_content": "hm\nso"}
ONE = {"role": "assistant", "content": "", "tool_calls": [_call(1, "Rome")]}
TWO = {"role": "assistant", "content": "Both.", "tool_calls": [_call(1, "Oslo"), _call(7, "Bonn")]}


def _result(number: int) -> dict[str, Any]:
    return {
        "role": "tool", "tool_call_id": f"call0000{number}", "name": "weather",
        "content": '{"degrees": 21}',
    }  # fmt: skip


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER],
    "system": [SYSTEM, USER],
    "several turns": [SYSTEM, USER, ANSWER, USER, ANSWER, USER],
    "reasoning": [USER, THOUGHT, USER],
    "a call": [SYSTEM, USER, ONE, _result(1)],
    "two calls": [USER, TWO, _result(1), _result(7), ANSWER, USER],
}


def texts(template: str, messages: list[dict[str, Any]], **how: Any) -> tuple[str | None, ...]:
    """Theirs and ours; None where it cannot be rendered."""
    try:
        theirs = render_jinja_template([messages], chat_template=template, **how, **SPECIAL)[0][0]
    except Exception:  # whatever a template raises
        theirs = None
    try:
        ours = render(template, messages, special_tokens=SPECIAL, **how)
    except RooflaxError:
        ours = None
    return theirs, ours


def main(folder: str) -> int:
    paths, failed, rendered = sorted(Path(folder).glob("*.jinja")), 0, 0
    for path in paths:
        template, said = path.read_text(encoding="utf-8"), []
        each = itertools.product(CONVERSATIONS.items(), (None, TOOLS), (False, True))
        for (name, messages), tools, prompts in each:
            theirs, ours = texts(template, messages, tools=tools, add_generation_prompt=prompts)
            rendered += ours is not None
            if theirs != ours:
                said.append(f"{name}{', tools' if tools else ''}{', prompt' if prompts else ''}")
        failed += bool(said)
        if said:
            print(f"{path.name}: differs: {'; '.join(said)}")
    print(f"{len(paths)} templates, {rendered} texts; {failed} templates differ")
    return 1 if failed or not paths else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
