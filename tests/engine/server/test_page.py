"""The chat page: its files and headers, and, where Chromium and playwright are, what it does."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from importlib.resources import files
from pathlib import Path

import httpx
import pytest

from rooflax.server.page import FILES, POLICY
from tests.support.server.live import ScriptedLLM, serving, wait_for

pytestmark = pytest.mark.oldest_jax

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync",
    "--disable-component-update",
]  # fmt: skip
PAGE = files("rooflax.server.page")
VENDORED = {
    "marked.umd.js": "bb95d4c15f1289f78486eaacebf3bb18688475ed58a040ef762ed49337090542",
    "purify.min.js": "8053ee2a6a09f9d50f7fcd6fb7f07072f52c7f3fa9aa12147cab4feaf65ee970",
}
HOSTILE = """\
<script>window.hit=1</script> <img src=x onerror='window.hit=1'> <svg/onload=window.hit=1>

<style>body { display: none }</style> <b style="position:fixed" onclick="window.hit=1">bold</b>

<div style="position: fixed; inset: 0" class="error" id="send">over all</div>

[a](javascript:window.hit=1) [b](JaVaScRiPt&#58;window.hit=1)

[c](data:text/html,<script>window.hit=1</script>)

[d](https://example.invalid/?q="onmouseover="window.hit=1) [e](vbscript:x) [f](&#1;javascript:hit=1)

![x](http://example.invalid/x.png) ![y](javascript:window.hit=1) ![z](x"onerror="window.hit=1)

<a href="javascript:window.hit=1">g</a> <iframe srcdoc="<script>parent.hit=1</script>"></iframe>

<form action="http://example.invalid"><input name=x autofocus onfocus=window.hit=1></form>

<math><mtext><table><mglyph><style><img src=x onerror=window.hit=1></style></mglyph></table></mtext>

<details open ontoggle=window.hit=1> <link rel=stylesheet href=//example.invalid> <base href=//x>

```"><img src=x onerror=window.hit=1>
</code></pre><script>window.hit=1</script>
```

- <object data="http://example.invalid"></object> `<script>window.hit=1</script>`

| <img src=x onerror=window.hit=1> | <u onclick=window.hit=1>u</u> |
| --- | --- |
| <noscript><p title="</noscript><img src=x onerror=window.hit=1>"> | <b>plain</b> |

[link]: javascript:window.hit=1 "t"

[h][link] <http://example.invalid/"onclick="hit=1> <plaintext> the end"""
LONG_ANSWER = r"""
const own = window.fetch;
window.frames_ms = []; window.sent = 0;
const piece = (number) => number % 400 === 399 ? "\n\n```\ncode\n```\n\n"
  : number % 80 === 79 ? "\n\n" : number % 17 === 16 ? "**word** " : "word ";
const event = (content) =>
  "data: " + JSON.stringify({ choices: [{ index: 0, delta: { content } }] }) + "\n\n";
window.fetch = (path, how) => !String(path).includes("chat/completions") ? own(path, how)
  : Promise.resolve(new Response(new ReadableStream({ async start(out) {
    const write = new TextEncoder();
    let last = performance.now(), runs = true;
    const frame = (now) => {
      window.frames_ms.push(now - last);
      last = now;
      if (runs) requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
    const begun = performance.now();
    while (window.sent < 10000) {
      await new Promise((go) => setTimeout(go, 10));
      const due = Math.min(10000, Math.ceil((performance.now() - begun) * 5));
      let text = "";
      for (; window.sent < due; window.sent += 1) text += event(piece(window.sent));
      out.enqueue(write.encode(text));
    }
    runs = false;
    out.enqueue(write.encode("data: [DONE]\n\n"));
    out.close();
  } }), { status: 200 }));
"""
WATCH = """addEventListener("securitypolicyviolation", (event) =>
  console.error("violation: " + event.violatedDirective + " " + event.blockedURI));"""


# ------------------------------------------------------------------------------- its files


@pytest.mark.parametrize("path", FILES)
def test_files_have_types_tags_and_a_strict_policy(live, path):
    found = live.http.get(path)
    kinds = {"": "text/html", ".css": "text/css", ".js": "text/javascript"}
    assert found.status_code == 200
    assert found.headers["content-type"] == f"{kinds[Path(path).suffix]}; charset=utf-8"
    assert found.headers["cache-control"] == "no-cache"
    assert found.headers["x-content-type-options"] == "nosniff"
    assert found.headers["content-security-policy"] == POLICY
    again = live.http.get(path, headers={"if-none-match": found.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_policy_allows_files_of_this_server_only():
    rules = dict(rule.split(" ", 1) for rule in POLICY.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert "unsafe" not in POLICY and "sha256" not in POLICY and "*" not in POLICY


def test_the_page_loads_its_own_files_and_has_nothing_inline():
    html = (PAGE / "index.html").read_text("utf-8")
    loaded = set(re.findall(r'(?:src|href)="([^"]+)"', html)) - {"data:,"}
    assert {f"/{each}" for each in loaded} == set(FILES) - {"/"}
    assert not re.search(r"<style|<script>|\bstyle=|\bon\w+=", html)
    names = ("app.js", "highlight.js", "style.css")
    app, highlight, style = ((PAGE / name).read_text("utf-8") for name in names)
    script = app + highlight
    assert not re.search(r"innerHTML|insertAdjacentHTML|eval\(|document\.write|Function\(", script)
    assert not re.search(r"https?://(?!\")", script + style) and "@import" not in style
    assert sum(each.count("\n") for each in (html, script, style)) <= 1350


@pytest.mark.parametrize("name", VENDORED)
def test_code_of_others_is_as_it_was_published(name):
    vendor = PAGE / "vendor"
    assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == VENDORED[name]
    assert name in (vendor / "NOTICE").read_text("utf-8")
    for licence in ("LICENSE-marked.md", "LICENSE-dompurify", "LICENSE-dompurify-MPL"):
        assert len((vendor / licence).read_text("utf-8")) > 1000


def test_props_say_what_the_page_needs(live, llm):
    found = live.http.get("/props").json()
    assert found["n_ctx"] == llm.max_model_len and found["chat_template_caps"]["tools"]
    assert found["chat_template_caps"]["efforts"] == []
    assert found["default_generation_settings"]["temperature"] == 0.0
    assert found["chat_settings"] == {}  # the checkpoint says how it is sampled
    assert found["settings"]["temperature"]["maximum"] == 2
    assert found["settings"]["seed"]["type"] == "integer"


def test_openapi_describes_every_route(live):
    found = live.http.get("/openapi.json").json()
    assert found["openapi"].startswith("3.1")
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/models/{name}", "/health"):
        assert found["paths"][path]
    schema = found["paths"]["/v1/completions"]["post"]["requestBody"]["content"]
    assert schema["application/json"]["schema"]["properties"]["temperature"]["maximum"] == 2


# --------------------------------------------------------------------------- in a browser


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


class Watched:
    """A context of the browser whose pages are watched.

    Attributes:
        wrong: errors of scripts, requests to others, and what the page's policy has stopped.
    """

    def __init__(self, browser, url, **options):
        self.url, self.wrong = url, []
        self.context = browser.new_context(**{"viewport": {"width": 1000, "height": 700}} | options)
        self.context.add_init_script(WATCH)

    def open(self, script=""):
        page = self.context.new_page()
        if script:
            page.add_init_script(script)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("request", self._asked)
        page.on("console", self._said)
        page.goto(self.url)
        return page

    def _asked(self, request):
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.wrong.append(request.url)

    def _said(self, message):
        if re.search("violat|Content Security|Trusted", message.text):
            self.wrong.append(message.text)


@pytest.fixture
def watched(browser, live):
    found = Watched(browser, live.url)
    yield found
    found.context.close()
    assert found.wrong == []


@pytest.fixture
def page(watched):
    """A page that has found its server."""
    found = watched.open()
    ready(found)
    return found


def ready(page):
    page.get_by_role("heading", name="rooflax-chat-5m").wait_for()


def ask(page, text):
    page.fill("#input", text)
    page.press("#input", "Enter")
    finished(page)


def finished(page):
    page.wait_for_selector("article.assistant")
    page.wait_for_selector("#send", state="visible")


def press(page, name):
    page.get_by_role("button", name=name, exact=True).last.click()


def answers(page):
    found = page.locator("article.assistant .text").all_inner_texts()
    return [each.strip() for each in found]


def questions(page):
    return page.locator("article.user .text").all_inner_texts()


def prompt(scripted):
    """What the model was asked last."""
    return scripted.llm.tokenizer.decode(scripted.asked[-1][0], skip_special_tokens=False)


def look(page):
    """The page asks for the server's state at once."""
    page.evaluate("() => document.dispatchEvent(new Event('visibilitychange'))")


def streamed(text, size=7):
    """An answer's events, a piece of the text each."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    events = [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    return "".join(f"data: {json.dumps(each)}\n\n" for each in events) + "data: [DONE]\n\n"


def change_props(page, **changed):
    def props(route):
        found = httpx.get(route.request.url, trust_env=False).json()
        route.fulfill(json=found | changed)

    page.route("**/props", props)


def answer_with(page, text):
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=streamed(text), content_type="text/event-stream"),
    )


def test_it_sends_and_shows_the_answer_and_its_figures(page, scripted):
    scripted.pause_s = 0.01
    ask(page, "Hi")
    assert answers(page) == ["Hello, world."]
    said = page.locator("article.assistant .about").inner_text()
    assert re.search(r"\d+ tokens · [\d.]+ tok/s · first after [\d.]+ s", said)
    assert re.fullmatch(r"\d+ of 512", page.inner_text("#used"))
    assert float(page.get_attribute("#meter", "value")) > 0
    assert page.inner_text("#said") == "Hello, world."


def test_the_share_of_the_roofline_is_shown(page):
    change_props(page, decode_roofline=0.876)
    ask(page, "Hi")
    page.get_by_text("88% of the roofline").wait_for()


def test_settings_are_those_of_props_and_are_sent(page, scripted):
    press(page, "Settings")
    assert page.get_attribute("#temperature", "placeholder") == "0"
    page.fill("#system", "Be brief.")
    values = {"temperature": "0.5", "top_k": "3", "seed": "7", "max_tokens": "2"}
    for name, value in (values | {"presence_penalty": "0.25"}).items():
        page.fill(f"#{name}", value)
    press(page, "Close")
    ask(page, "Hi")
    params = scripted.asked[-1][1]
    assert (params.temperature, params.top_k, params.seed, params.max_tokens) == (0.5, 3, 7, 2)
    assert params.presence_penalty == 0.25 and "Be brief." in prompt(scripted)
    assert page.get_by_text("ended by the limit of tokens").is_visible()
    page.reload()
    page.wait_for_selector("#seed", state="attached")
    assert page.input_value("#seed") == "7" and page.input_value("#system") == "Be brief."


def test_a_chat_is_sampled_as_chats_are_where_nobody_says_how(page, scripted):
    change_props(page, chat_settings={"temperature": 0.7, "top_p": 0.9})
    page.reload()
    ready(page)
    press(page, "Settings")
    assert page.get_attribute("#temperature", "placeholder") == "0.7"
    page.fill("#top_p", "0.5")
    press(page, "Close")
    ask(page, "Hi")
    params = scripted.asked[-1][1]
    assert (params.temperature, params.top_p) == (0.7, 0.5)


def test_efforts_are_offered_where_the_template_tells_them_apart(page):
    change_props(page, chat_template_caps={"chat": True, "tools": True, "efforts": ["low", "high"]})
    page.reload()
    asked = []
    page.on("request", lambda request: asked.append(request.post_data_json))
    press(page, "Settings")
    page.select_option("#effort", "high")
    press(page, "Close")
    answer_with(page, "Yes.")
    ask(page, "Hi")
    assert [each["reasoning_effort"] for each in asked if each] == ["high"]


def test_an_empty_chat_greets_with_examples_that_are_asked(page, scripted):
    greeting = page.get_by_role("region", name="Examples")
    assert "A demo of five million parameters" in greeting.inner_text()
    press(page, "What does zip do?")
    finished(page)
    assert questions(page) == ["What does zip do?"] and greeting.is_hidden()
    press(page, "New chat")
    assert greeting.is_visible()
    change_props(page, model_alias="another")
    page.reload()
    page.get_by_role("button", name="Write a haiku about the sea.").wait_for()
    caps = {"chat": False, "tools": False, "efforts": []}
    change_props(page, model_alias="another", chat_template_caps=caps)
    page.reload()
    page.get_by_role("button", name="def add(a, b):").wait_for()


def test_code_is_coloured_as_its_language_says(page):
    code = "```python\ndef f(x):  # \"why\"\n    return '''a\nb''' + str(0x1F) + \"<b>\"\n```"
    others = "```sql\nselect 'x' -- y\n```\n\n```nothing\ndef f(x): 1\n```"
    answer_with(page, f"{code}\n\n{others}")
    ask(page, "Hi")

    def coloured(name):
        return page.locator(f"pre .{name}").all_inner_texts()

    assert coloured("keyword") == ["def", "return", "select"]
    assert coloured("comment") == ['# "why"', "-- y"]
    assert coloured("string") == ["'''a\nb'''", '"<b>"', "'x'"]
    assert coloured("number") == ["0x1F"] and coloured("called") == ["f", "str"]
    assert page.locator("pre").all_inner_texts()[2] == "def f(x): 1"
    colours = (
        "() => new Set(Array.from(document.querySelectorAll('pre span'), "
        "(each) => getComputedStyle(each).color)).size"
    )
    assert page.evaluate(colours) == 5


def test_stop_ends_the_request_and_keeps_what_there_is(page, scripted):
    scripted.script, scripted.pause_s = (lambda prompt, params, index: [65]), 0.05
    page.fill("#input", "Hi")
    page.keyboard.press("Enter")
    page.locator("article.assistant .text p").wait_for()
    assert scripted.num_open == 1
    page.keyboard.press("Escape")
    finished(page)
    wait_for(lambda: scripted.num_open == 0)
    assert page.get_by_text("stopped").is_visible() and answers(page) != [""]
    assert page.evaluate("() => document.activeElement.id") == "input"


def test_edits_and_further_answers_are_branches_that_a_reload_keeps(page, scripted):
    ask(page, "First")
    scripted.script = scripted.says("Another.")
    press(page, "Regenerate")
    page.get_by_text("2/2").wait_for()
    assert answers(page) == ["Another."]
    press(page, "Earlier branch")
    assert answers(page) == ["Hello, world."] and page.get_by_text("1/2").is_visible()
    press(page, "Later branch")
    press(page, "Edit")
    page.get_by_role("textbox", name="Edit the question").fill("Second")
    page.keyboard.press("Enter")
    finished(page)
    assert questions(page) == ["Second"] and "First" not in prompt(scripted)
    ask(page, "More")
    page.reload()
    page.get_by_text("More").last.wait_for()
    assert questions(page) == ["Second", "More"]
    page.get_by_role("button", name="Earlier branch").first.click()
    assert questions(page) == ["First"] and answers(page) == ["Another."]


def test_many_chats_are_kept_and_a_new_one_erases_none(page):
    ask(page, "Apples")
    press(page, "New chat")
    assert answers(page) == []
    ask(page, "Pears")
    page.reload()
    page.locator("#chats .title", has_text="Apples").click()
    assert questions(page) == ["Apples"]
    page.once("dialog", lambda dialog: dialog.accept())
    press(page, "Delete Apples")
    page.get_by_text("Apples").last.wait_for(state="detached")
    page.reload()
    page.locator("#chats .title", has_text="Pears").wait_for()
    assert not page.locator("#chats .title", has_text="Apples").count()


def test_an_answer_goes_on_while_another_chat_is_shown(page, scripted):
    scripted.pause_s = 0.05
    page.fill("#input", "Slow")
    page.keyboard.press("Enter")
    press(page, "New chat")
    assert questions(page) == [] and page.locator("#stop").is_visible()
    page.locator("#chats .title", has_text="Slow").click()
    finished(page)
    assert answers(page) == ["Hello, world."]


def test_two_tabs_show_the_same_chats(watched, page):
    ask(page, "Apples")
    other = watched.open()
    other.locator("#chats .title", has_text="Apples").click()
    ask(other, "Pears")
    page.locator("article.user", has_text="Pears").wait_for()
    ask(page, "Plums")
    other.locator("article.user", has_text="Plums").wait_for()
    assert questions(page) == questions(other) == ["Apples", "Pears", "Plums"]
    page.once("dialog", lambda dialog: dialog.accept())
    press(page, "Delete Apples")
    other.locator("article.user").first.wait_for(state="detached")
    assert not other.locator("#chats .title", has_text="Apples").count()


def test_what_is_exported_can_be_imported(watched, browser, page, live, tmp_path):
    ask(page, "Hi")
    press(page, "Regenerate")
    page.get_by_text("2/2").wait_for()
    press(page, "New chat")
    ask(page, "There")
    with page.expect_download() as download:
        press(page, "Export")
    path = tmp_path / "chats.json"
    download.value.save_as(path)
    found = json.loads(path.read_text())["chats"]
    assert sorted(len(chat["nodes"]) for chat in found) == [2, 3]
    other = Watched(browser, live.url)
    empty = other.open()
    ready(empty)
    empty.set_input_files("#file", path)
    empty.get_by_text("2 chats were read").wait_for()
    empty.locator("#chats .title", has_text="Hi").click()
    assert answers(empty) == ["Hello, world."] and empty.get_by_text("2/2").is_visible()
    for number, text in enumerate(("[]", "{", '{"format": "rooflax-chats", "chats": [{}]}')):
        (tmp_path / f"{number}.json").write_text(text)
        empty.set_input_files("#file", tmp_path / f"{number}.json")
        empty.get_by_text("The file cannot be read").wait_for()
    assert other.wrong == []
    other.context.close()


def test_calls_are_shown_and_their_results_go_on(page, scripted):
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    press(page, "Settings")
    page.fill("#tools", '[{"name": "get_weather"')
    assert "JSON" in page.inner_text("#tools-said")
    page.fill("#tools", '[{"name": "get_weather", "parameters": {"type": "object"}}]')
    assert page.inner_text("#tools-said") == ""
    press(page, "Close")
    scripted.script = scripted.says(call)
    ask(page, "Weather?")
    assert '"get_weather"' in prompt(scripted)
    assert '"city": "Oslo"' in page.locator(".call pre").inner_text()
    scripted.script = scripted.says("Cold.")
    page.get_by_label("Result of get_weather").fill('{"degrees": -3}')
    press(page, "Send result")
    page.get_by_text("Cold.").first.wait_for()
    finished(page)
    assert "<tool_call>" in prompt(scripted) and '<tool_response>\n{"degrees": -3}' in prompt(
        scripted
    )
    page.reload()
    page.locator("article.tool pre").wait_for()
    assert "-3" in page.locator("article.tool pre").inner_text()
    assert not page.get_by_label("Result of get_weather").count()


def test_markdown_is_drawn_alike_streamed_and_whole(page):
    text = (
        "# Title\n\nSome **bold**, `code` and [a link][l].\n\n1. one\n2. two\n\n   more\n\n"
        "```python\ndef f():\n    return 1\n```\n\n| a | b |\n| - | -: |\n| 1 | 2 |\n\n"
        "- [x] done\n- [ ] open\n\n> quoted\n\nH<sub>2</sub>O\n\n[l]: https://example.org/"
    )
    answer_with(page, text)
    ask(page, "Hi")
    drawn = page.inner_html("article.assistant .text")
    for tag in ("h1", "strong", "code", "ol", "pre", "table", "blockquote", "sub"):
        assert f"<{tag}" in drawn
    assert 'rel="noopener noreferrer nofollow"' in drawn and "☑ done" in drawn
    assert page.locator(".code .bar").inner_text().startswith("python")
    page.reload()
    page.locator("article.assistant h1").wait_for()
    assert page.inner_html("article.assistant .text") == drawn


def test_code_can_be_copied(page, watched):
    watched.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer_with(page, "So:\n\n```\nx = '<1>'\n```")
    ask(page, "Hi")
    press(page, "Copy code")
    page.get_by_text("Copied").wait_for()
    assert page.evaluate("() => navigator.clipboard.readText()").strip() == "x = '<1>'"
    page.evaluate("() => Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    press(page, "Copy question")
    page.focus("#input")
    page.keyboard.press("Control+V")
    assert page.input_value("#input") == "Hi"


def test_hostile_text_is_harmless(page):
    answer_with(page, HOSTILE)
    ask(page, "<img src=x onerror=window.hit=1>")
    page.locator(".text", has_text="the end").wait_for()
    assert page.evaluate("() => window.hit") is None
    harm = "script, style, img, svg, math, iframe, form, input, object, link, base, noscript"
    inside = page.locator("#turns .text")
    for number in range(inside.count()):
        assert inside.nth(number).locator(harm).count() == 0
    attributes = page.evaluate(
        """() => [...document.querySelectorAll(".text *")].flatMap((each) => [...each.attributes]
        .map(({ name, value }) => [name, value]))"""
    )
    names = {name for name, _ in attributes}
    assert not {name for name in names if name.startswith("on")} and "style" not in names
    assert "id" not in names
    hrefs = [value for name, value in attributes if name == "href"]
    assert hrefs and all(re.match(r"https?:|mailto:", each) for each in hrefs)
    assert page.locator("#send").is_visible() and "<style>body" in page.inner_text("#turns")


def test_hostile_files_are_harmless(page, tmp_path):
    evil = "<img src=x onerror=window.hit=1>"
    nodes = [
        {"role": evil, "parent": 5, "content": evil, "figures": {"tokens": evil, evil: 1}},
        {"role": "assistant", "parent": 0, "content": HOSTILE, "reasoning": evil, "error": evil,
         "state": "failed", "calls": [{"id": evil, "name": evil, "arguments": evil}, None]},
        {"role": "tool", "parent": 1, "content": evil, "name": evil, "call": 7},
    ]  # fmt: skip
    settings = {"system": 1, "numbers": {"__proto__": "1", "n": "16", "seed": evil}}
    chat = {"id": evil, "changed": evil, "leaf": 2, "nodes": nodes, "settings": settings}
    path = tmp_path / "evil.json"
    path.write_text(json.dumps({"format": "rooflax-chats", "version": 1, "chats": [chat]}))
    page.set_input_files("#file", path)
    page.get_by_text("1 chat was read").wait_for()
    assert page.evaluate("() => window.hit") is None
    assert page.locator("#turns img, #turns script").count() == 0
    assert evil in questions(page)


def test_reasoning_is_folded_and_read_again_by_the_template(page, scripted):
    scripted.script = scripted.says("<think>Hm.</think>Yes.")
    ask(page, "Hi")
    assert answers(page) == ["Yes."]
    fold = page.locator("details.reasoning")
    assert fold.text_content() == "ReasoningHm." and fold.get_attribute("open") is None
    fold.locator("summary").click()
    assert page.get_by_text("Hm.").is_visible()


def test_answers_that_failed_or_are_empty_are_not_sent(page, scripted):
    scripted.error = (3, ValueError("broken"))
    ask(page, "One")
    page.get_by_text("The engine failed").first.wait_for()
    scripted.error, scripted.script = None, scripted.says("")
    ask(page, "Two")
    assert page.get_by_text("an empty answer").is_visible()
    scripted.script = scripted.says("Good.")
    ask(page, "Three")
    assert re.findall(r"<\|im_start\|>(\w+)\n", prompt(scripted)) == ["user", "assistant"]
    assert "One\n\nTwo\n\nThree" in prompt(scripted) and "Hello" not in prompt(scripted)
    page.get_by_role("button", name="Try again").first.click()
    page.get_by_text("Good.").first.wait_for()
    finished(page)
    assert answers(page) == ["Good."] and not page.get_by_text("1/2").count()


def test_a_full_server_is_asked_again_when_it_said(page):
    asked = []

    def full(route):
        asked.append(route)
        if len(asked) > 2:
            route.fallback()
            return
        error = {"message": "Full.", "code": "queue_full"}
        route.fulfill(status=429, headers={"retry-after": "1"}, json={"error": error})

    page.route("**/v1/chat/completions", full)
    page.fill("#input", "Hi")
    page.keyboard.press("Enter")
    page.get_by_text("The server is full: trying again in 1 s").wait_for()
    wait_for(lambda: page.wait_for_timeout(100) or len(asked) == 2)
    press(page, "Try now")
    finished(page)
    assert answers(page) == ["Hello, world."] and len(asked) == 3
    asked.clear()
    page.fill("#input", "Again")
    page.keyboard.press("Enter")
    page.get_by_text("The server is full").wait_for()
    press(page, "Stop")
    finished(page)
    assert page.get_by_text("stopped").is_visible() and page.locator("#now").is_hidden()


def test_states_of_the_server_are_said(page):
    def answers_with(status, body):
        return lambda route: route.fulfill(status=status, json=body)

    page.route("**/health", answers_with(503, {"status": "loading", "progress": "weights"}))
    look(page)
    page.get_by_text("The model is loading: weights").wait_for()
    page.unroute("**/health")
    page.route("**/ready", answers_with(503, {"status": "draining"}))
    page.get_by_text("The server is stopping").wait_for()
    page.context.set_offline(True)
    page.get_by_text("The server cannot be reached").wait_for()
    page.unroute("**/ready")
    page.context.set_offline(False)
    page.get_by_text("The server cannot be reached").wait_for(state="detached")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "Hi")
    assert page.inner_text(".error") == "The connection to the server was lost."
    page.unroute("**/v1/chat/completions")
    press(page, "Try again")
    page.get_by_text("Hello, world.").first.wait_for()
    finished(page)


def test_without_a_store_or_with_a_full_one_it_goes_on(watched):
    page = watched.open("Object.defineProperty(window, 'indexedDB', { value: undefined });")
    ready(page)
    assert page.get_by_text("This browser keeps no chats").is_visible()
    ask(page, "Hi")
    press(page, "New chat")
    page.locator("#chats .title", has_text="Hi").click()
    assert answers(page) == ["Hello, world."]
    full = "new DOMException('full', 'QuotaExceededError')"
    page = watched.open(f"IDBObjectStore.prototype.put = () => {{ throw {full}; }};")
    ready(page)
    ask(page, "Hi")
    page.get_by_text("The browser's store is full").wait_for()
    assert answers(page) == ["Hello, world."]


def test_a_model_without_a_template_goes_on_with_text(watched, scripted, live):
    page = watched.context.new_page()
    change_props(page, chat_template_caps={"chat": False, "tools": False, "efforts": []})
    page.goto(live.url)
    page.get_by_text("no chat template").wait_for()
    ask(page, "Once upon")
    assert answers(page) == ["Hello, world."]
    assert "im_start" not in prompt(scripted) and scripted.asked[-1][1].max_tokens == 256


def test_keys_and_narrow_screens(browser, llm):
    with serving(lambda _: ScriptedLLM(llm), api_keys=("secret",)) as server:
        for path in FILES:
            assert server.http.get(path).status_code == 200
        narrow = {"viewport": {"width": 360, "height": 640}, "color_scheme": "dark"}
        watched = Watched(browser, server.url, **narrow)
        page = watched.open()
        page.get_by_role("heading", name="The server asks for a key").wait_for()
        assert page.locator("#key-said").get_attribute("class") == "key"
        assert page.evaluate("() => document.activeElement.id") == "key"
        assert page.locator("#system").is_hidden()
        page.keyboard.type("wrong")
        page.keyboard.press("Tab")
        page.locator("#key-said.error", has_text="The server does not know this key").wait_for()
        page.fill("#key", "secret")
        page.keyboard.press("Tab")
        ready(page)
        page.locator("#settings").wait_for(state="hidden")
        press(page, "Settings")
        assert page.get_by_role("heading", name="Settings").is_visible()
        kept = "() => [sessionStorage, localStorage].map((each) => each.getItem('rooflax-key'))"
        assert page.evaluate(kept) == ["secret", None]
        page.check("#remember")
        assert page.evaluate(kept) == ["secret", "secret"]
        width = "() => document.documentElement.scrollWidth"
        assert page.evaluate(width) <= 360
        page.keyboard.press("Escape")
        answer_with(page, f"`{'x' * 200}`\n\n```\n{'y' * 200}\n```\n\n|{'a | ' * 30}\n|{'-|' * 30}")
        ask(page, "z" * 200)
        assert page.evaluate(width) <= 360
        press(page, "Chats")
        assert page.locator("#chats .title").is_visible() and page.evaluate(width) <= 360
        page.keyboard.press("Escape")
        assert page.locator("#chats .title").is_hidden()
        assert watched.wrong == []
        watched.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_use_it(page, scripted, scheme):
    """axe-core finds nothing serious: an answer, reasoning, a call; then the settings."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page.emulate_media(color_scheme=scheme)
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    scripted.script = scripted.says("<think>Hm.</think>See `x`:\n\n```\ncode\n```\n\n- a" + call)
    press(page, "Settings")
    page.fill("#tools", '[{"name": "f"}]')
    press(page, "Close")
    ask(page, "Hi")
    assert page.get_by_label("Result of f").is_visible()
    script = (Path(axe.__file__).parent / "axe.min.js").read_text("utf-8")
    page.evaluate(f"() => {{ {script} }}")  # the page's policy loads no script of others
    for state in ("conversation", "settings"):
        if state == "settings":
            press(page, "Settings")
        found = page.evaluate("() => axe.run()")
        serious = [
            (each["id"], each["nodes"][0]["html"][:120], each["nodes"][0]["failureSummary"])
            for each in found["violations"]
            if each["impact"] in ("serious", "critical")
        ]
        assert serious == []
        assert len(found["passes"]) > 10


def test_a_keyboard_is_enough(page, scripted):
    active = "() => document.activeElement.id || document.activeElement.textContent"
    assert page.evaluate(active) == "input"
    page.keyboard.type("Hi")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("you")
    page.keyboard.press("Enter")
    page.get_by_text("Hello, world.").first.wait_for()
    finished(page)
    assert page.evaluate(active) == "input" and questions(page) == ["Hi\nyou"]
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Control+A")
    page.keyboard.type("Ho")
    page.keyboard.press("Enter")
    page.get_by_text("2/2").wait_for()
    finished(page)
    reached = set()
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.add(page.evaluate(active))
        if page.evaluate(active) == "Regenerate":
            break
    assert {"new", "export", "import", "show", "turns", "Edit", "Regenerate"} <= reached
    page.keyboard.press("Enter")
    page.get_by_text("2/2").nth(1).wait_for()
    finished(page)
    page.focus("#show")
    page.keyboard.press("Enter")
    assert page.locator("#settings").is_visible()
    page.keyboard.press("Escape")
    assert page.locator("#settings").is_hidden() and page.evaluate(active) == "show"


def test_whole_sentences_are_read_out(page, scripted):
    scripted.script, scripted.pause_s = scripted.says("One is. Two are! Are three? Four"), 0.03
    page.evaluate(
        """() => { window.heard = []; new MutationObserver((all) => all.forEach((each) =>
        each.addedNodes.forEach((node) => window.heard.push(node.textContent))))
        .observe(document.getElementById("said"), { childList: true }); }"""
    )
    ask(page, "Hi")
    heard = page.evaluate("() => window.heard")
    assert " ".join(heard) == "One is. Two are! Are three? Four" and len(heard) >= 3
    assert all(re.search(r"[.!?]$", each) for each in heard[:-1])


def test_a_long_answer_leaves_the_page_responsive(watched):
    """10,000 tokens in two seconds: frames are on time, and finished blocks are drawn once."""
    page = watched.open(LONG_ANSWER)
    ready(page)
    page.fill("#input", "Go")
    page.press("#input", "Enter")
    page.wait_for_function("() => document.querySelectorAll('.text > div').length > 9")
    blocks = "[...document.querySelectorAll('.text > div')].slice(0, 8)"
    page.evaluate(f"() => {{ window.early = {blocks}; }}")
    page.wait_for_function("() => window.sent === 10000", timeout=60000)
    page.keyboard.type("still typing")
    finished(page)
    assert page.input_value("#input") == "still typing"
    assert page.locator("article.assistant .text").inner_text().count("word") >= 9000
    assert page.evaluate("() => window.early.every((block) => block.isConnected)")
    frames = sorted(page.evaluate("() => window.frames_ms"))
    assert len(frames) > 20 and frames[int(0.9 * len(frames))] < 100
