"""The text of a chat, as transformers' `apply_chat_template(tokenize=False)` gives it."""

from rooflax.loading.chat_template import _plain_items, _render, _variables


def render(
    template, messages, *, add_generation_prompt=False, bos_token=None, eos_token=None,
    special_tokens=None, tools=None, documents=None, **kwargs,
):  # fmt: skip
    named = {"bos_token": bos_token, "eos_token": eos_token}
    given = {name: text for name, text in named.items() if text is not None}
    special = {**(special_tokens or {}), **given}
    variables = _variables(messages, tools, documents, add_generation_prompt, special)
    return _render(template, variables | _plain_items(kwargs), None)
