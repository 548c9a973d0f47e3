"""The chat page: its bytes and headers, and, where Chromium and playwright are, what it does."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.server.live import ScriptedLLM, serving, wait_for

pytestmark = pytest.mark.oldest_jax

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync",
    "--disable-component-update",
]  # fmt: skip
HOSTILE = [
    "<img src=x onerror='window.hit=1'>", "<script>window.hit=1</script>",
    "```\n<script>window.hit=1</script>\n```", "</div><svg onload=window.hit=1>",
    "[x](javascript:window.hit=1) ![](http://example.invalid/x.png)",
]  # fmt: skip


def test_the_page_is_one_file_that_loads_nothing(live):
    found = live.http.get("/")
    assert found.status_code == 200 and found.headers["content-type"].startswith("text/html")
    assert not re.search(r"(src|href)=\"(?!data:)|https?://|@import|url\(", found.text)
    assert "innerHTML" not in found.text and "eval(" not in found.text
    policy = found.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert policy.count("sha256-") == 2
    again = live.http.get("/", headers={"if-none-match": found.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_props_say_what_the_page_needs(live, llm):
    found = live.http.get("/props").json()
    assert found["n_ctx"] == llm.max_model_len and found["chat_template_caps"]["tools"]
    assert found["default_generation_settings"]["temperature"] == 0.0


def test_openapi_describes_every_route(live):
    found = live.http.get("/openapi.json").json()
    assert found["openapi"].startswith("3.1")
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/models/{name}", "/health"):
        assert found["paths"][path]
    schema = found["paths"]["/v1/completions"]["post"]["requestBody"]["content"]
    assert schema["application/json"]["schema"]["properties"]["temperature"]["maximum"] == 2


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("Chromium is not here")
    with api.sync_playwright() as running:
        found = running.chromium.launch(executable_path=path, args=FLAGS)
        yield found
        found.close()


@pytest.fixture
def page(browser, live):
    """A page that has found its server; fails when it asked anyone else, or threw."""
    context = browser.new_context(viewport={"width": 800, "height": 600})
    found, wrong = context.new_page(), []
    found.on("pageerror", lambda error: wrong.append(str(error)))
    found.on("request", lambda asked: asked.url.startswith(live.url) or wrong.append(asked.url))
    found.goto(live.url)
    found.get_by_role("heading", name="rooflax-chat-5m").wait_for()
    yield found
    assert [each for each in wrong if each != "data:,"] == []
    context.close()


def ask(page, text):
    page.fill("#input", text)
    page.keyboard.press("Enter")
    page.wait_for_selector("article.assistant")
    page.wait_for_selector("#send", state="visible")


def answers(page):
    return page.locator("article.assistant .text").all_text_contents()


def test_it_sends_and_shows_the_answer_and_its_figures(page, scripted):
    scripted.pause_s = 0.01
    ask(page, "Hi")
    assert answers(page) == ["Hello, world."]
    said = page.locator("article.assistant .about").text_content()
    assert re.search(r"\d+ tokens · [\d.]+ tok/s · first after [\d.]+ s · context \d+ of 512", said)
    assert page.locator("#said").text_content() == "Hello, world."


def test_settings_are_sent(page, scripted):
    page.click("#show")
    page.fill("#system", "Be brief.")
    for name, value in (("temperature", "0.5"), ("top_k", "3"), ("seed", "7"), ("max_tokens", "2")):
        page.fill(f"#{name}", value)
    ask(page, "Hi")
    prompt, params, _ = scripted.asked[-1]
    assert (params.temperature, params.top_k, params.seed, params.max_tokens) == (0.5, 3, 7, 2)
    assert "Be brief." in scripted.llm.tokenizer.decode(prompt)


def test_stop_ends_the_request(page, scripted):
    scripted.script, scripted.pause_s = (lambda prompt, params, index: [65]), 0.05
    page.fill("#input", "Hi")
    page.keyboard.press("Enter")
    page.wait_for_selector("#stop", state="visible")
    wait_for(lambda: scripted.num_open == 1)
    page.keyboard.press("Escape")
    page.wait_for_selector("#send", state="visible")
    wait_for(lambda: scripted.num_open == 0)


def test_edit_again_reload_and_new(page, scripted):
    ask(page, "First")
    scripted.script = scripted.says("Another.")
    page.get_by_role("button", name="Again").click()
    page.get_by_text("Another.").first.wait_for()
    page.get_by_role("button", name="Edit").click()
    assert page.input_value("#input") == "First"
    ask(page, "Second")
    assert "Second" in scripted.llm.tokenizer.decode(scripted.asked[-1][0])
    page.reload()
    page.get_by_text("Second").wait_for()
    assert answers(page) == ["Another."]
    page.get_by_role("button", name="New chat").click()
    assert answers(page) == []


def test_what_is_exported_can_be_imported(page, tmp_path):
    ask(page, "Hi")
    page.click("#show")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    path = tmp_path / "conversation.json"
    download.value.save_as(path)
    assert [turn["role"] for turn in json.loads(path.read_text())["turns"]] == ["user", "assistant"]
    page.get_by_role("button", name="New chat").click()
    page.set_input_files("#file", path)
    page.get_by_text("Hello, world.").first.wait_for()


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_a_model_is_text(page, scripted, text):
    scripted.script = scripted.says(text)
    ask(page, "Hi")
    wanted = "<script>window.hit=1</script>" if text.startswith("```") else text
    assert [each.strip() for each in answers(page)] == [wanted]
    assert page.evaluate("() => window.hit") is None


def test_reasoning_is_folded_and_errors_are_said(page, scripted):
    scripted.script = scripted.says("<think>Hm.</think>Yes.")
    ask(page, "Hi")
    assert answers(page) == ["Yes."]
    assert "Hm." in page.locator("details").text_content()
    scripted.error = (0, ValueError("broken"))
    ask(page, "Hi")
    page.get_by_text("The engine failed").first.wait_for()


def test_keys_and_narrow_screens(browser, llm):
    with serving(lambda _: ScriptedLLM(llm), api_keys=("secret",)) as server:
        context = browser.new_context(viewport={"width": 360, "height": 640}, color_scheme="dark")
        page = context.new_page()
        page.goto(server.url)
        page.get_by_text("There is no valid key").wait_for()
        page.fill("#key", "secret")
        page.keyboard.press("Tab")
        page.get_by_role("heading", name="rooflax-chat-5m").wait_for()
        ask(page, "Hi")
        assert answers(page) == ["Hello, world. How are you?"]
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
        context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_use_it(page, scripted, scheme):
    """axe-core finds nothing serious, with an answer, reasoning, a call and the settings shown."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page.emulate_media(color_scheme=scheme)
    scripted.script = scripted.says("<think>Hm.</think>See `x`:\n\n```\ncode\n```\n\n- a\n- b")
    ask(page, "Hi")
    page.click("#show")
    script = (Path(axe.__file__).parent / "axe.min.js").read_text("utf-8")
    page.evaluate(f"() => {{ {script} }}")  # the page's policy loads no script of others
    found = page.evaluate("() => axe.run()")
    serious = [
        (each["id"], each["nodes"][0]["html"][:120], each["nodes"][0]["failureSummary"])
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
    ]
    assert serious == []
    assert len(found["passes"]) > 10


def test_a_keyboard_is_enough(page, scripted):
    page.keyboard.press("Tab")
    reached = set()
    for _ in range(20):
        reached.add(
            page.evaluate("() => document.activeElement.id || document.activeElement.tagName")
        )
        page.keyboard.press("Tab")
    assert {"input", "show"} <= reached
    page.focus("#input")
    page.keyboard.type("Hi")
    page.keyboard.press("Enter")
    page.get_by_text("Hello, world.").first.wait_for()
    assert page.evaluate("() => document.activeElement.id") == "input"
    page.keyboard.press("ArrowUp")
    assert page.input_value("#input") == "Hi"
