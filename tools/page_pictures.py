"""Draws the pictures of the chat page in docs/images: `python -m tools.page_pictures`.

A scripted engine says what is seen, so that calls, reasoning and Markdown are there at once.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from rooflax import LLM
from rooflax.models.presets import CHAT_NAME
from tests.support.server.live import ScriptedLLM, serving

FOLDER = Path(__file__).parents[1] / "docs/images"
WIDE, NARROW = {"width": 1080, "height": 860}, {"width": 360, "height": 940}
TOOLS = '[{"name": "get_weather", "parameters": {"type": "object"}}]'
CALL = """<think>I need the forecast.</think><tool_call>
{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}
</tool_call>"""
RESULT = '{"low": [-3, -6], "high": [1, -1], "sky": ["clear", "snow"]}'
ANSWER = """<think>Both nights are below zero. I should say so first, and then show how to turn \
it into Fahrenheit.</think>**Yes, on both days.** It snows tomorrow:

| day | low | high | sky |
| --- | ---: | ---: | --- |
| today | -3 | 1 | clear |
| tomorrow | -6 | -1 | snow |

In Fahrenheit:

```python
def fahrenheit(celsius):
    return celsius * 9 / 5 + 32
```

- Take warm shoes.
- `fahrenheit(-6)` is 21.2."""
TO_THE_END = """() => { document.activeElement.blur();
  const turns = document.getElementById("turns"); turns.scrollTop = turns.scrollHeight; }"""


def finished(page) -> None:
    page.wait_for_selector("article.assistant .about button")


def ask(page, text: str) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")
    finished(page)


def draw(browser, url: str, scripted: ScriptedLLM, size: dict[str, int], scheme: str) -> None:
    """One picture."""
    context = browser.new_context(viewport=size, color_scheme=scheme)
    page = context.new_page()
    page.goto(url)
    page.get_by_role("heading", name=CHAT_NAME).wait_for()
    scripted.script = scripted.says("Hello.")
    if size is WIDE:
        for text in ("A limerick on caches", "What does len do?"):
            ask(page, text)
            page.click("#new")
    page.click("#show")
    page.fill("#tools", TOOLS)
    page.click("#close")
    scripted.script = scripted.says(CALL)
    ask(page, "Will it freeze in Oslo, today or tomorrow?")
    scripted.script = scripted.says(ANSWER)
    page.get_by_label("Result of get_weather").fill(RESULT)
    page.get_by_role("button", name="Send result").click()
    finished(page)
    page.get_by_role("button", name="Regenerate").last.click()
    page.get_by_text("2/2").wait_for()
    page.locator("summary").last.click()
    page.evaluate(TO_THE_END)
    name = f"chat-page-{'wide' if size is WIDE else 'narrow'}-{scheme}.png"
    page.screenshot(path=FOLDER / name)
    context.close()


def main() -> None:
    from playwright.sync_api import sync_playwright

    scripted = ScriptedLLM(LLM(CHAT_NAME))
    scripted.pause_s = 0.004
    with serving(lambda _: scripted) as server, sync_playwright() as running:
        browser = running.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for size in (WIDE, NARROW):
            for scheme in ("light", "dark"):
                draw(browser, server.url, scripted, size, scheme)
        browser.close()


if __name__ == "__main__":
    main()
