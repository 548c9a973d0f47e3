"""Published chat templates: our text equals that of transformers' apply_chat_template.

    python -m tests.published_templates LLAMA_CPP [FOLDER]

LLAMA_CPP is llama.cpp's tree, which is in the source distribution of llama-cpp-python: it has the
templates of many models as their repositories publish them. FOLDER may have files *.jinja besides,
of checkpoints at hand. Each is rendered with one turn, several turns, a system prompt, reasoning,
tools, calls and their results, with and without the beginning of an answer. Where transformers
cannot render a conversation, ours must not either. Prints a row for each family.
"""

import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from rooflax.errors import RooflaxError
from rooflax.loading.chat_template import render
from rooflax.models.registry import FAMILIES

JINJA = "models/templates"
CASES = "tests/test-chat-template.cpp"
"""Where LLAMA_CPP has templates: files, and strings of a test, by their names."""

PUBLISHED = {
    "llama": ("meta-llama-Llama-3.2-3B-Instruct", "meta-llama-Llama-3.1-8B-Instruct",
              "deepseek-ai-DeepSeek-R1-Distill-Llama-8B"),
    "qwen2": ("Qwen-Qwen2.5-7B-Instruct", "Qwen-QwQ-32B"),
    "qwen3": ("Qwen-Qwen3-0.6B",),
    "qwen3_moe": ("Qwen3-Coder",),
    "smollm3": ("HuggingFaceTB-SmolLM3-3B",),
    "gpt_oss": ("openai-gpt-oss-120b",),
    "mistral": ("mistralai-Mistral-Nemo-Instruct-2407",
                "mistralai/Mistral-7B-Instruct-v0.2 (NOTE: Old pre-v1 without a system prompt)"),
    "mistral3": ("Mistral-Small-3.2-24B-Instruct-2506",),
    "ministral3": ("mistralai-Ministral-3-14B-Reasoning-2512",),
    "seed_oss": ("ByteDance-Seed-OSS",),
    "granite": ("ibm-granite-granite-3.3-2B-Instruct", "ibm-granite/granite-3.0-8b-instruct"),
    "granitemoehybrid": ("ibm-granite-granite-4.0",),
    "phi3": ("microsoft-Phi-3.5-mini-instruct", "Phi-3-mini", "phi-4"),
    "glm4": ("ChatGLM4",),
    "glm4_moe": ("GLM-4.6",),
    "cohere2": ("CohereForAI-c4ai-command-r7b-12-2024-tool_use",),
    "lfm2": ("LFM2.5-Instruct",),
    "qwen3_5": ("Qwen3.5-4B",),
    "gemma4": ("google-gemma-4-31B-it",),
    "deepseek_v2": ("DeepSeek-V2",),
    "deepseek_v3": ("deepseek-ai-DeepSeek-V3.1", "Kimi-K2-Instruct"),
}  # fmt: skip
"""By family, models whose templates LLAMA_CPP has."""

SAME = {
    "qwen3_5_text": "qwen3_5", "qwen3_5_moe": "qwen3_5", "qwen3_5_moe_text": "qwen3_5",
    "gemma4_text": "gemma4", "gemma3": "gemma3_text",
}  # fmt: skip
"""Families whose models have the templates of another."""

NOT_FOUND = {
    "gpt2": "has none",
    "gemma3_text": "", "qwen2_moe": "", "mixtral": "", "olmo2": "", "olmo3": "", "ernie4_5": "",
    "exaone4": "", "hunyuan_v1_dense": "", "qwen3_next": "",
}  # fmt: skip
"""Families of which LLAMA_CPP has no template; with one in FOLDER they are compared too."""

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


def _cases(text: str) -> dict[str, str]:
    """The templates of the test, by name. Its strings' escapes are those of JSON."""
    string = r'("(?:[^"\\]|\\.)*")'
    pairs = re.findall(
        rf"\.name= \*/ +{string}.*?\.template_str= \*/ +(?:U8C\()?{string}", text, re.DOTALL
    )
    return {json.loads(name): json.loads(template) for name, template in pairs}


def compare(template: str) -> tuple[int, list[str]]:
    """How many conversations were rendered, and those that differ."""
    rendered, differ = 0, []
    each = itertools.product(CONVERSATIONS.items(), (None, TOOLS), (False, True))
    for (name, messages), tools, prompts in each:
        theirs, ours = texts(template, messages, tools=tools, add_generation_prompt=prompts)
        rendered += ours is not None
        if theirs != ours:
            differ.append(f"{name}{', tools' if tools else ''}{', prompt' if prompts else ''}")
    return rendered, differ


def main(llama_cpp: str, *folders: str) -> int:
    known = _cases((Path(llama_cpp) / CASES).read_text(encoding="utf-8"))
    for folder in (Path(llama_cpp) / JINJA, *map(Path, folders)):
        known |= {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("*.jinja"))}
    failed = []
    print("| family | template of | texts | differ |\n| --- | --- | --- | --- |")
    used = set()
    for family in sorted(FAMILIES):
        names = PUBLISHED.get(SAME.get(family, family), ())
        if not names:
            why = NOT_FOUND[SAME.get(family, family)] or "not in LLAMA_CPP"
            print(f"| {family} | {why} | | |")
        for name in names:
            used.add(name)
            rendered, differ = compare(known[name]) if name in known else (0, ["it is not there"])
            print(f"| {family} | {name} | {rendered} | {'; '.join(differ) or 'none'} |")
            if differ or not rendered:
                failed.append(name)
    rest = [compare(known[name]) for name in known if name not in used]
    differ = [what for _, each in rest for what in each]
    print(f"| others | {len(rest)} templates | {sum(n for n, _ in rest)} | {len(differ)} |")
    return 1 if failed or differ else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
