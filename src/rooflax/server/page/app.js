// The chat page. It asks the server that it came from, and nobody else.
//
// A chat is a tree of messages: each names the one before it, an edit or a further answer begins a
// branch, and `leaf` is the last message of the branch that is shown. Messages are never removed.

import { highlighted } from "./highlight.js";

const $ = (id) => document.getElementById(id);
const OPEN_CHAT = "rooflax-chat", KEY = "rooflax-key", THEME = "rooflax-theme";
const FILE_FORMAT = "rooflax-chats";
const DRAW_MS = 50, KEEP_MS = 1000, LOOK_MS = 10000, LOOK_AGAIN_MS = 1000, RETRY_S = 5;
const COMPLETION_TOKENS = 256;
const DEMO_EXAMPLES = ["What does zip do?", "Write a function that reverses a string.",
  "Give me JSON with name Ada, age 36.", "How many letters has house?"];
const EXAMPLES = ["Explain recursion with a small example.", "Write a Python function that reads a CSV file.",
  "Which questions should I ask before I rent a flat?", "Write a haiku about the sea."];
const BASE_EXAMPLES = ["def add(a, b):", "import ", "Once upon a time"];

let props = null;      // what /props says, once it could be read
let chats = [];        // all of them
let chat = null;       // the one that is shown
let running = null;    // the answer that is being written: { chat, node, stop, clock, spoken }
let views = new Map(); // by message: how its article is brought up to date

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

const button = (textContent, onclick, more = {}) =>
  make("button", { type: "button", textContent, onclick, ...more });

// A store of the browser may be forbidden: then nothing is remembered.
function recall(area, name) {
  try { return window[area].getItem(name); } catch { return null; }
}

function remember(area, name, value) {
  try {
    if (value) window[area].setItem(name, value);
    else window[area].removeItem(name);
  } catch { /* forbidden or full */ }
}

// ------------------------------------------------------------------------------ what is said

const says = { page: "", server: "" };

function say(text, who = "page") {
  says[who] = text;
  const said = says.server || says.page;
  if ($("state").textContent !== said) $("state").textContent = said;
}

// Whole sentences, as they are finished: a screen reader does not read every token.
function speak(text, isLast) {
  const rest = text.slice(running.spoken);
  const end = isLast ? rest.length : Math.max(0, ...Array.from(
    rest.matchAll(/[.!?:]["')*]*\s|\n/g), (found) => found.index + found[0].length));
  const said = rest.slice(0, end).replace(/[`*_#|]+/g, "").trim();
  running.spoken += end;
  if (said) $("said").append(make("p", { textContent: said }));
  while ($("said").childElementCount > 20) $("said").firstChild.remove();
}

// --------------------------------------------------------------------------------- Markdown

const TAGS = ["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "em", "strong", "del", "code",
  "pre", "ul", "ol", "li", "blockquote", "table", "thead", "tbody", "tr", "th", "td", "a", "sub",
  "sup", "kbd", "mark", "b", "i", "u"];
const PURE = {
  ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ["href", "title", "start", "align", "data-lang"],
  ADD_URI_SAFE_ATTR: ["start", "align", "data-lang"], ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false, RETURN_DOM_FRAGMENT: true,
};
const PLAIN_TAG = /^<\/?(?:br|sub|sup|kbd|mark|b|i|u|em|strong|del|code)\s*\/?>$/i;
const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escaped = (text) => text.replace(/[&<>"']/g, (character) => ENTITIES[character]);

// HTML is shown as the text it is, but for plain tags of formatting; images become links.
const reader = new window.marked.Marked({ gfm: true, renderer: {
  code: ({ text, lang }) =>
    `<pre data-lang="${escaped((lang ?? "").split(/\s/)[0])}"><code>${escaped(text)}</code></pre>`,
  html: ({ text, block }) =>
    PLAIN_TAG.test(text) ? text : block ? `<p>${escaped(text)}</p>` : escaped(text),
  image: ({ href, text }) => `<a href="${escaped(href)}">image: ${escaped(text || href)}</a>`,
  checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
} });

window.DOMPurify.addHook("afterSanitizeAttributes", (element) => {
  if (element.tagName !== "A") return;
  element.setAttribute("target", "_blank");
  element.setAttribute("rel", "noopener noreferrer nofollow");
});

function drawBlock(token) {
  const html = reader.parser([token], reader.defaults);
  const block = make("div", {}, window.DOMPurify.sanitize(html, PURE));
  for (const pre of block.querySelectorAll("pre")) dressCode(pre);
  return block;
}

function dressCode(pre) {
  const box = make("div", { className: "code" });
  colour(pre.querySelector("code"), pre.textContent, pre.dataset.lang);
  pre.replaceWith(box);
  pre.tabIndex = 0;
  box.append(make("div", { className: "bar" },
    make("span", { textContent: pre.dataset.lang || "code" }),
    copyButton("Copy code", () => pre.textContent)), pre);
}

const colour = (element, code, language) => element.replaceChildren(...highlighted(code, language));

// A text that grows: blocks that are finished stay as they are, and only the last is read again.
class Markdown {
  constructor(element) {
    this.element = element;
    this.read = 0;    // characters of finished blocks
    this.last = null; // the block that may still change, and its token
    this.raws = [];   // the sources of the blocks
    this.whole = "";  // the source, once it is finished
  }

  show(source) {
    const text = source.replace(/\r\n?/g, "\n");
    const tokens = reader.lexer(text.slice(this.read));
    const end = tokens.findLastIndex((token) => token.type !== "space");
    tokens.slice(0, end + 1).forEach((token, number) => {
      if (token.type !== "space") this.put(token);
      if (number === end) return;
      this.read += token.raw.length;
      if (token.type !== "space") this.last = null;
    });
  }

  put(token) {
    const before = this.last?.token;
    if (before?.raw === token.raw) return;
    if (before?.type === "code" && token.type === "code" && before.lang === token.lang) {
      const pre = this.last.block.querySelector("pre");
      colour(pre.firstChild, token.text, pre.dataset.lang);
    } else {
      const block = drawBlock(token);
      if (this.last) this.last.block.replaceWith(block);
      else this.element.append(block);
      this.last = { block };
    }
    this.last.token = token;
    this.raws[this.element.childElementCount - 1] = token.raw;
  }

  // Draws all again where the end changed what an earlier block means: its cut, or its links.
  finish(source) {
    if (this.whole === source) return;
    this.whole = source;
    this.show(source);
    const tokens = reader.lexer(source), blocks = tokens.filter((token) => token.type !== "space");
    const isSame = blocks.length === this.raws.length && !Object.keys(tokens.links).length
      && blocks.every((token, number) => token.raw === this.raws[number]);
    if (!isSame) this.element.replaceChildren(...blocks.map((token) => drawBlock(token)));
  }
}

// Without a secure context, as on another machine without TLS, there is no clipboard.
async function copy(text) {
  try { return await navigator.clipboard.writeText(text); } catch { /* the old way */ }
  const area = make("textarea", { value: text, className: "hidden" });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

function copyButton(name, text) {
  return button("Copy", async (event) => {
    const pressed = event.currentTarget;
    await copy(text());
    pressed.focus();
    pressed.textContent = "Copied";
    setTimeout(() => { pressed.textContent = "Copy"; }, 1500);
  }, { ariaLabel: name });
}

// ----------------------------------------------------------------------- the browser's store

const NO_STORE = "This browser keeps no chats here: they are lost with this tab. Export them.";
const FULL_STORE = "The browser's store is full: what is new is not kept. Export, then delete chats.";
const tabs = new BroadcastChannel("rooflax");
let base = null, saving = Promise.resolve(), kept = 0;

function note(text) {
  if ($("store").textContent !== text) $("store").textContent = text;
}

function openBase() {
  return new Promise((found, failed) => {
    const asked = window.indexedDB.open("rooflax", 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore("chats", { keyPath: "id" });
    asked.onsuccess = () => found(asked.result);
    asked.onerror = asked.onblocked = () => failed(asked.error);
  });
}

function inStore(mode, work) {
  return new Promise((found, failed) => {
    const transaction = base.transaction("chats", mode);
    const asked = work(transaction.objectStore("chats"));
    transaction.oncomplete = () => found(asked.result);
    transaction.onabort = () => failed(transaction.error ?? asked.error);
  });
}

async function openStore() {
  try {
    base = await openBase();
    base.onversionchange = () => base.close();
    chats = (await inStore("readonly", (store) => store.getAll())).map(readChat);
  } catch {
    base = null;
    note(NO_STORE);
  }
}

// What is written here is in memory too: where the store fails, the chat goes on.
function keep(one) {
  one.changed = kept = Date.now();
  write(one);
}

function write(one) {
  if (!base) return;
  saving = saving.then(() => inStore("readwrite", (store) => store.put(one))).then(
    () => { note(""); tabs.postMessage(one.id); },
    (error) => note(error?.name === "QuotaExceededError" ? FULL_STORE : NO_STORE));
}

async function forget(one) {
  chats = chats.filter((each) => each !== one);
  if (!base) return;
  await inStore("readwrite", (store) => store.delete(one.id)).catch(() => note(NO_STORE));
  tabs.postMessage(one.id);
}

// Another tab has written or deleted a chat: it is the same here, so that neither undoes the other.
async function takeOver(id) {
  if (!base || running?.chat.id === id) return;
  const found = await inStore("readonly", (store) => store.get(id)).catch(() => null);
  chats = chats.filter((one) => one.id !== id);
  if (found) chats.push(readChat(found));
  if (chat?.id !== id) { drawChats(); return; }
  if (!found) { startChat(); return; }
  chat = chats.at(-1);
  fillSettings(); draw(); drawChats();
}

// ------------------------------------------------------------------------------ chats as trees

const text = (value) => (typeof value === "string" ? value : "");

function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function readSettings(found) {
  const numbers = Object.entries(found?.numbers ?? {})
    .filter(([name, value]) => /^[a-z_]+$/.test(name) && typeof value === "string");
  return { system: text(found?.system), tools: text(found?.tools), effort: text(found?.effort),
    numbers: Object.fromEntries(numbers) };
}

function newChat(settings) {
  return { id: newId(), changed: Date.now(), settings: readSettings(settings), nodes: [], leaf: -1 };
}

// A chat from the store or from a file: only what it should have, of the right kind.
function readChat(found) {
  if (!Array.isArray(found?.nodes)) throw new Error("a chat in it has no messages");
  const nodes = found.nodes.map(readNode);
  const leaf = Number.isInteger(found.leaf) && found.leaf < nodes.length ? found.leaf : -1;
  return { id: text(found.id) || newId(), changed: Number(found.changed) || 0,
    settings: readSettings(found.settings), nodes, leaf: nodes.length && leaf < 0 ? nodes.length - 1 : leaf };
}

function readNode(found, id) {
  const parent = Number.isInteger(found.parent) && found.parent < id ? found.parent : -1;
  const role = ["user", "assistant", "tool"].includes(found.role) ? found.role : "user";
  const calls = Array.isArray(found.calls) ? found.calls : [];
  const node = { ...emptyNode(id, Math.max(-1, parent), role), content: text(found.content),
    reasoning: text(found.reasoning), error: text(found.error), call: text(found.call),
    name: text(found.name),
    calls: calls.map((call) => ({ id: text(call?.id), name: text(call?.name),
      arguments: text(call?.arguments) })) };
  for (const [name, value] of Object.entries(found.figures ?? {}))
    if (Number.isFinite(value)) node.figures[name] = value;
  if (["failed", "stopped", "cut"].includes(found.state)) node.state = found.state;
  if (found.state === "running") node.state = "stopped"; // the page was closed meanwhile
  return node;
}

function emptyNode(id, parent, role) {
  return { id, parent, role, content: "", reasoning: "", calls: [], call: "", name: "",
    state: "done", error: "", figures: {} };
}

function add(one, parent, role, more = {}) {
  const node = Object.assign(emptyNode(one.nodes.length, parent, role), more);
  one.nodes.push(node);
  one.leaf = node.id;
  return node;
}

function pathTo(one, id) {
  const found = [];
  for (let at = id; at >= 0; at = one.nodes[at].parent) found.unshift(one.nodes[at]);
  return found;
}

function title(one) {
  const first = one.nodes.find((node) => node.role === "user")?.content.trim() ?? "";
  return first.split("\n")[0].slice(0, 80) || "New chat";
}

// The branch of a message that was begun last.
function deepest(one, id) {
  for (;;) {
    const below = one.nodes.findLast((node) => node.parent === id);
    if (!below) return id;
    id = below.id;
  }
}

// --------------------------------------------------------------------------------- requests

// An answer that failed or is empty is no part of the conversation.
const counts = (node) => node.role !== "assistant"
  || (node.state !== "failed" && (node.content.trim() !== "" || callsOf(node).length > 0));
const callsOf = (node) => (node.state === "done" ? node.calls : []);

function messages(one, id) {
  const found = [];
  for (const node of pathTo(one, id).filter(counts)) {
    const last = found.at(-1);
    // Where an answer was left out, many templates would reject two questions in a row.
    if (node.role === "user" && last?.role === "user") last.content += `\n\n${node.content}`;
    else found.push(message(node));
  }
  return found;
}

function message(node) {
  const found = { role: node.role, content: node.content };
  if (node.role === "tool") found.tool_call_id = node.call;
  if (node.reasoning) found.reasoning_content = node.reasoning;
  if (callsOf(node).length) found.tool_calls = node.calls.map((call) => ({ id: call.id,
    type: "function", function: { name: call.name, arguments: call.arguments } }));
  return found;
}

function readTools(source) {
  if (!source.trim()) return [];
  let found;
  try { found = JSON.parse(source); } catch (error) { throw new Error(`Tools: ${error.message}`); }
  if (!Array.isArray(found)) throw new Error("Tools: they must be a JSON list.");
  return found.map((tool) => (tool?.function ? tool : { type: "function", function: tool }));
}

function request(one, node) {
  const { system, tools, effort, numbers } = one.settings, caps = props.chat_template_caps;
  const body = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  for (const name of Object.keys(props.settings)) {
    const value = numbers[name] || props.chat_settings[name];
    if (value) body[name] = Number(value);
  }
  const said = messages(one, node.parent);
  if (!caps.chat) return ["v1/completions",
    { max_tokens: COMPLETION_TOKENS, ...body, prompt: said.map((each) => each.content).join("\n") }];
  if (system.trim()) said.unshift({ role: "system", content: system });
  const functions = caps.tools ? readTools(tools) : [];
  if (functions.length) body.tools = functions;
  if (caps.efforts.includes(effort)) body.reasoning_effort = effort;
  return ["v1/chat/completions", { ...body, messages: said }];
}

function headers() {
  const key = $("key").value.trim();
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

// An answer that is no success, as an error with what the server said.
async function refusal(found) {
  const error = new Error(`The server answered ${found.status}.`);
  error.status = found.status;
  error.wait = Number(found.headers.get("retry-after")) || RETRY_S;
  try {
    const said = (await found.json()).error;
    error.message = said.message;
    error.code = said.code;
  } catch { /* it is no JSON */ }
  if (found.status === 401) {
    error.message = "The server asks for an API key; the settings take it.";
    askForKey();
  }
  return error;
}

async function* events(body) {
  const pieces = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await pieces.read();
    if (done) throw new TypeError("the answer has no end");
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.startsWith("data: ") ? part.slice(6) : "";
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

// --------------------------------------------------------------------------------- an answer

// The stream of an answer; waits as long as the server is full or loads.
async function ask(one, node, signal) {
  const [path, body] = request(one, node);
  for (;;) {
    running.clock.asked = performance.now();
    const found = await fetch(path, { method: "POST", headers: headers(), signal,
      body: JSON.stringify(body) });
    if (found.ok) return found.body;
    const why = await refusal(found);
    if (found.status !== 429 && why.code !== "loading") throw why;
    await countDown(found.status === 429 ? "The server is full" : "The model is loading", why.wait,
      signal);
  }
}

function countDown(why, seconds, signal) {
  return new Promise((again, ended) => {
    const finish = (then) => () => {
      clearInterval(clock);
      $("now").hidden = true;
      say("Waiting for the answer");
      then(signal.reason);
    };
    const tick = () => {
      if (seconds <= 0) finish(again)();
      else say(`${why}: trying again in ${seconds} s`);
      seconds -= 1;
    };
    const clock = setInterval(tick, 1000);
    $("now").onclick = finish(again);
    $("now").hidden = false;
    signal.addEventListener("abort", finish(ended), { once: true });
    tick();
  });
}

async function answer(one, node = add(one, one.leaf, "assistant")) {
  const stop = new AbortController();
  running = { chat: one, node, stop, spoken: 0, clock: { asked: 0, first: 0, last: 0, usage: null } };
  Object.assign(node, emptyNode(node.id, node.parent, "assistant"), { state: "running" });
  one.leaf = node.id;
  $("said").replaceChildren();
  say("Waiting for the answer");
  draw(); drawChats(); drawControls(); keep(one);
  try {
    for await (const event of events(await ask(one, node, stop.signal))) take(node, event);
    if (node.state === "running") node.state = "done";
  } catch (error) { fails(node, error); }
  finish();
}

function take(node, event) {
  const { clock } = running;
  if (event.error) throw new Error(event.error.message);
  if (event.usage) clock.usage = event.usage;
  const choice = event.choices?.[0];
  if (!choice) return;
  const delta = choice.delta ?? { content: choice.text };
  const thought = delta.reasoning_content ?? delta.reasoning;
  if (delta.content || thought || delta.tool_calls) {
    clock.last = performance.now();
    if (!clock.first) say("");
    clock.first ||= clock.last;
  }
  node.content += delta.content ?? "";
  node.reasoning += thought ?? "";
  for (const call of delta.tool_calls ?? []) takeCall(node, call);
  if (choice.finish_reason === "length") node.state = "cut";
  node.figures = figures(clock);
  later();
}

function takeCall(node, { index, id, function: called }) {
  const call = (node.calls[index] ??= { id: "", name: "", arguments: "" });
  call.id ||= id ?? "";
  call.name += called?.name ?? "";
  call.arguments += called?.arguments ?? "";
}

function fails(node, error) {
  if (error?.name === "AbortError") { node.state = "stopped"; return; }
  node.state = "failed";
  node.error = error instanceof TypeError ? "The connection to the server was lost." : error.message;
  if (error instanceof TypeError || error.status === 503) look();
}

function finish() {
  const { chat: one, node } = running;
  views.get(node)?.show();
  if (node.error) running.spoken = 0;
  speak(node.error || node.content, true);
  running = null;
  say("");
  keep(one); drawControls(); drawChats(); drawMeter();
  for (const view of views.values()) view.settle();
  follow();
  if ([document.body, $("stop")].includes(document.activeElement)) $("input").focus();
  if (node.state === "done" || node.state === "cut") addShare(one, node);
}

async function addShare(one, node) {
  try {
    const found = await fetch("props", { headers: headers() });
    const share = (await found.json()).decode_roofline;
    if (!share) return;
    node.figures.share = share;
    views.get(node)?.show();
    write(one);
  } catch { /* it is one figure less */ }
}

function figures({ asked, first, last, usage }) {
  const found = {};
  if (usage) Object.assign(found, { tokens: usage.completion_tokens, prompt: usage.prompt_tokens,
    cached: usage.prompt_tokens_details?.cached_tokens ?? 0 });
  if (first) found.first = (first - asked) / 1000;
  if (last > first && usage) found.speed = (1000 * (usage.completion_tokens - 1)) / (last - first);
  return found;
}

function figuresText({ tokens, speed, first, cached, share }) {
  const parts = [];
  if (tokens) parts.push(tokens === 1 ? "1 token" : `${tokens} tokens`);
  if (speed) parts.push(`${speed.toFixed(1)} tok/s`);
  if (first) parts.push(`first after ${first.toFixed(2)} s`);
  if (cached) parts.push(`${cached} cached`);
  if (share) parts.push(`${Math.round(100 * share)}% of the roofline`);
  return parts.join(" · ");
}

// At most one drawing in DRAW_MS, and never more than a fifth of the time.
let due = false, spentMs = 0;
function later() {
  if (due) return;
  due = true;
  setTimeout(() => {
    due = false;
    if (!running) return;
    const began = performance.now();
    views.get(running.node)?.show();
    speak(running.node.content, false);
    follow();
    drawMeter();
    if (Date.now() - kept > KEEP_MS) keep(running.chat);
    spentMs = performance.now() - began;
  }, Math.max(DRAW_MS, 4 * spentMs));
}

// ------------------------------------------------------------------------- the conversation

let follows = true; // the view stays at the end unless the reader has scrolled away
function follow() {
  if (follows) $("turns").scrollTop = $("turns").scrollHeight;
}

function draw() {
  views = new Map();
  const drawers = { user: drawQuestion, assistant: drawAnswer, tool: drawResult };
  const drawn = pathTo(chat, chat.leaf).map((node) => {
    const about = make("div", { className: "about" });
    const article = make("article", { className: node.role });
    const view = drawers[node.role](node, article, about);
    article.append(about);
    view.show();
    view.settle();
    views.set(node, { ...view, article });
    return article;
  });
  $("turns").replaceChildren(...(drawn.length ? drawn : greeting()));
  follows = true;
  follow();
  drawMeter();
}

// What an empty chat shows: who answers, and questions that it can answer.
function greeting() {
  if (!props) return [];
  const isDemo = props.model_alias === "rooflax-chat-5m";
  const said = isDemo ? "A demo of five million parameters: it explains Python's built-ins, writes "
    + "small functions and JSON, spells words, and knows no facts."
    : props.chat_template_caps.chat ? "Your questions stay between this browser and the server."
      : "This model has no chat template: it goes on with what you write.";
  const examples = isDemo ? DEMO_EXAMPLES : props.chat_template_caps.chat ? EXAMPLES : BASE_EXAMPLES;
  return [make("section", { className: "greeting", ariaLabel: "Examples" },
    make("h2", { textContent: "Ask a question" }), make("p", { textContent: said }),
    make("div", {}, ...examples.map((each) => button(each, () => {
      $("input").value = each;
      send();
    }))))];
}

function drawQuestion(node, article, about) {
  article.append(make("div", { className: "text", textContent: node.content }));
  return { show() {}, settle: () => about.replaceChildren(...(running ? [] : [...branches(node),
    button("Edit", () => edit(node)), copyButton("Copy question", () => node.content)])) };
}

function drawResult(node, article, about) {
  article.append(callBox("result of", node.name, node.content));
  return { show() {}, settle: () => about.replaceChildren(...(running ? [] : branches(node))) };
}

function drawAnswer(node, article, about) {
  const thought = make("div"), content = make("div", { className: "text" }), calls = make("div");
  const fold = make("details", { className: "reasoning" },
    make("summary", { textContent: "Reasoning", onclick: () => { isTouched = true; } }), thought);
  const buttons = make("span", { className: "row" }), figure = make("span");
  const error = make("span", { className: "error" });
  const markdown = new Markdown(content);
  let isTouched = false, shownCalls = "";
  article.append(fold, content, calls);
  about.append(buttons, figure, error);
  const show = () => {
    fold.hidden = !node.reasoning;
    if (node.reasoning) thought.append(node.reasoning.slice(thought.textContent.length));
    if (!isTouched) fold.open = node.state === "running" && !node.content;
    if (node.state === "running") markdown.show(node.content);
    else markdown.finish(node.content);
    figure.textContent = figuresText(node.figures);
    error.textContent = trouble(node);
    const now = JSON.stringify([node.calls, node.state]);
    if (now !== shownCalls) drawCalls(node, calls);
    shownCalls = now;
  };
  return { show, settle: () => {
    buttons.replaceChildren(...(running ? [] : answerButtons(node)));
    drawCalls(node, calls);
  } };
}

function answerButtons(node) {
  const again = () => canAsk()
    && answer(chat, counts(node) ? add(chat, node.parent, "assistant") : node);
  return [...branches(node), copyButton("Copy answer", () => node.content),
    button(counts(node) ? "Regenerate" : "Try again", again)];
}

function trouble(node) {
  if (node.state === "failed") return node.error;
  if (node.state === "stopped") return "stopped";
  if (node.state === "cut") return "ended by the limit of tokens";
  return node.state === "done" && !counts(node) ? "an empty answer" : "";
}

// Which of the messages that follow the same one this is, and the way to the others.
function branches(node) {
  const all = chat.nodes.filter((each) => each.parent === node.parent);
  const at = all.indexOf(node);
  if (all.length < 2) return [];
  const go = (to, name) => button(name, () => {
    chat.leaf = deepest(chat, all[to].id);
    draw(); keep(chat);
    const near = [...views.get(all[to]).article.querySelectorAll("button.branch:enabled")];
    (near.find((each) => each.textContent === name) ?? near[0])?.focus();
  }, { className: "branch", disabled: to < 0 || to >= all.length,
    ariaLabel: name === "‹" ? "Earlier branch" : "Later branch" });
  return [go(at - 1, "‹"), make("span", { textContent: `${at + 1}/${all.length}` }), go(at + 1, "›")];
}

// ------------------------------------------------------------------------------- tool calls

function pretty(source) {
  try { return JSON.stringify(JSON.parse(source), null, 2); } catch { return source; }
}

function callBox(what, name, source) {
  return make("div", { className: "call" },
    make("div", { className: "bar" }, make("span", {}, `${what} `,
      make("b", { textContent: name })), copyButton("Copy JSON", () => source)),
    make("pre", { textContent: source, tabIndex: 0 }));
}

// The calls of an answer; under those of the last one, what they gave can be typed.
function drawCalls(node, element) {
  const isOpen = !running && chat.leaf === node.id && callsOf(node).length > 0;
  const areas = isOpen ? node.calls.map(() => make("textarea", { rows: 2 })) : [];
  const boxes = node.calls.map((call, number) => {
    const box = callBox("tool call", call.name, pretty(call.arguments));
    if (isOpen) box.append(make("label", {}, `Result of ${call.name}`, areas[number]));
    return box;
  });
  element.replaceChildren(...boxes);
  if (isOpen) element.append(button(areas.length > 1 ? "Send results" : "Send result",
    () => sendResults(node, areas.map((area) => area.value)), { className: "main" }));
}

function sendResults(node, results) {
  if (!canAsk()) return;
  let parent = node.id;
  results.forEach((content, number) => {
    const { id, name } = node.calls[number];
    parent = add(chat, parent, "tool", { content, call: id, name }).id;
  });
  answer(chat);
}

// --------------------------------------------------------------------------- what one writes

function canAsk() {
  if (running) return false;
  if (props) return true;
  say(says.server || "The server has not been found yet");
  return false;
}

function send() {
  const content = $("input").value;
  if (!content.trim() || !canAsk()) return;
  $("input").value = "";
  fit($("input"));
  question(content, chat.leaf);
}

function question(content, parent) {
  add(chat, parent, "user", { content });
  answer(chat);
}

function edit(node) {
  const { article } = views.get(node);
  const area = make("textarea", { value: node.content, rows: 2, ariaLabel: "Edit the question" });
  const leave = () => { draw(); $("input").focus(); };
  const go = () => { if (area.value.trim() && canAsk()) question(area.value, node.parent); $("input").focus(); };
  area.onkeydown = (event) => {
    if (event.key === "Escape") { event.stopPropagation(); leave(); }
    if (isEnter(event)) { event.preventDefault(); go(); }
  };
  area.oninput = () => fit(area);
  article.replaceChildren(make("div", { className: "editor" }, area,
    make("div", { className: "row" }, button("Cancel", leave),
      button("Send", go, { className: "main" }))));
  fit(area);
  area.focus();
}

const isEnter = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;

function fit(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

function onInputKey(event) {
  if (isEnter(event)) { event.preventDefault(); send(); }
  if (event.key !== "ArrowUp" || $("input").value || running) return;
  const last = pathTo(chat, chat.leaf).findLast((node) => node.role === "user");
  if (last) { event.preventDefault(); edit(last); }
}

// ---------------------------------------------------------------------------------- the frame

function drawControls() {
  $("send").hidden = Boolean(running);
  $("stop").hidden = !running;
}

function drawMeter() {
  const last = pathTo(chat, chat.leaf).findLast((node) => node.figures.prompt);
  $("context").hidden = !props || !last;
  if ($("context").hidden) return;
  const used = last.figures.prompt + last.figures.tokens;
  $("meter").max = props.n_ctx;
  $("meter").high = 0.8 * props.n_ctx;
  $("meter").value = used;
  $("used").textContent = `${used} of ${props.n_ctx}`;
}

function drawChats() {
  chats.sort((a, b) => b.changed - a.changed);
  $("chats").replaceChildren(...chats.map((one) => make("li", { className: one === chat ? "open" : "" },
    button(title(one), () => show(one), { className: "title", title: title(one),
      ariaCurrent: one === chat ? "true" : "false" }),
    button("×", () => drop(one), { className: "drop", ariaLabel: `Delete ${title(one)}` }))));
}

function show(one) {
  chat = one;
  remember("sessionStorage", OPEN_CHAT, one.id);
  if (!chats.includes(one)) chats.push(one);
  fillSettings(); draw(); drawChats(); showList(false);
  $("input").focus();
}

function startChat() {
  const empty = chats.find((one) => !one.nodes.length);
  if (empty) Object.assign(empty, { changed: Date.now(), settings: readSettings(chat?.settings) });
  show(empty ?? newChat(chat?.settings));
}

async function drop(one) {
  if (running?.chat === one) { say("Stop the answer before its chat is deleted"); return; }
  if (!window.confirm(`Delete "${title(one)}"?`)) return;
  await forget(one);
  if (one === chat) startChat();
  else { drawChats(); $("new").focus(); }
}

function showList(isShown) {
  document.body.classList.toggle("lists", isShown);
  $("list").ariaExpanded = String(isShown);
  if (isShown) $("new").focus();
}

// ---------------------------------------------------------------------------------- settings

function drawNumbers() {
  const given = props.default_generation_settings;
  $("numbers").replaceChildren(...Object.entries(props.settings).map(([name, schema]) => {
    const words = name.replaceAll("_", " ");
    const input = make("input", { id: name, type: "number", title: schema.description,
      placeholder: props.chat_settings[name] ?? given[name] ?? "", step: schema.type === "integer" ? 1 : 0.05 });
    const low = schema.minimum ?? schema.exclusiveMinimum;
    if (Number.isSafeInteger(low)) input.min = low;
    if (Number.isSafeInteger(schema.maximum)) input.max = schema.maximum;
    return make("label", {}, words[0].toUpperCase() + words.slice(1), input);
  }));
  const { chat: hasTemplate, efforts, tools } = props.chat_template_caps;
  $("effort").replaceChildren($("effort").options[0], ...efforts.map((each) => new Option(each)));
  $("effort-row").hidden = !efforts.length;
  $("tools").disabled = !tools;
  $("system").disabled = !hasTemplate;
  fillSettings();
}

function fillSettings() {
  for (const name of ["system", "tools", "effort"]) $(name).value = chat.settings[name];
  for (const input of $("numbers").querySelectorAll("input"))
    input.value = chat.settings.numbers[input.id] ?? "";
  checkTools();
}

function takeSettings() {
  for (const name of ["system", "tools", "effort"]) chat.settings[name] = $(name).value;
  for (const { id, value } of $("numbers").querySelectorAll("input")) chat.settings.numbers[id] = value;
  checkTools();
  keep(chat);
}

function checkTools() {
  let said = props && !props.chat_template_caps.tools ? "This model knows no tools." : "";
  try { readTools($("tools").value); } catch (error) { said = error.message; }
  $("tools-said").textContent = said;
}

// The settings, reduced to the key until the server takes one or the reader leaves.
function askForKey() {
  const isWrong = $("key").value.trim() !== "";
  $("key-said").textContent = isWrong ? "The server does not know this key."
    : "Whoever runs the server has one. It is sent to this server alone.";
  $("key-said").className = isWrong ? "key error" : "key";
  $("settings-title").textContent = "The server asks for a key";
  $("close").textContent = "Continue";
  $("settings").classList.add("asks");
  if (!$("settings").open) $("settings").showModal();
  $("key").focus();
}

function stopAsking() {
  $("settings").classList.remove("asks");
  $("settings-title").textContent = "Settings";
  $("close").textContent = "Close";
  $("key-said").textContent = "";
}

function takeKey() {
  const key = $("key").value.trim();
  remember("sessionStorage", KEY, key);
  remember("localStorage", KEY, $("remember").checked ? key : "");
}

function takeTheme() {
  document.documentElement.dataset.theme = $("theme").value;
  remember("localStorage", THEME, $("theme").value);
}

// --------------------------------------------------------------------------- files of chats

function exportChats() {
  const data = { format: FILE_FORMAT, version: 1, chats: chats.filter((one) => one.nodes.length) };
  const link = make("a", { download: "rooflax-chats.json",
    href: URL.createObjectURL(new Blob([JSON.stringify(data, null, 1)], { type: "application/json" })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// Of a chat that is here already, the one that was changed last stays.
async function importChats(file) {
  try {
    const found = JSON.parse(await file.text());
    if (found?.format !== FILE_FORMAT || !Array.isArray(found.chats)) throw new Error("it holds no chats");
    const read = found.chats.map(readChat);
    for (const one of read) takeChat(one);
    say(read.length === 1 ? "1 chat was read" : `${read.length} chats were read`);
    if (read.length) show(chats.find((one) => one.id === read[0].id));
  } catch (error) { say(`The file cannot be read: ${error.message}`); }
}

function takeChat(one) {
  const known = chats.find((each) => each.id === one.id);
  if (known && (known.changed >= one.changed || known === running?.chat)) return;
  chats = [...chats.filter((each) => each !== known), one];
  write(one);
}

// -------------------------------------------------------------------------------- the server

const LOST = "The server cannot be reached";

async function serverState() {
  try {
    const health = await fetch("health"), found = await health.json();
    if (found.status === "loading") return `The model is loading: ${found.progress}`;
    if (!health.ok) return "The server's engine has stopped";
    return (await fetch("ready")).ok ? "" : "The server is stopping and takes no more questions";
  } catch { return LOST; }
}

let looking = 0, isReached = false;
async function look() {
  clearTimeout(looking);
  if (!document.hidden || !isReached) {
    const state = await serverState(), isBack = !state && !isReached;
    isReached = !state;
    say(state, "server");
    if (isBack) await readProps();
  }
  clearTimeout(looking);
  looking = setTimeout(look, isReached ? LOOK_MS : LOOK_AGAIN_MS);
}

async function readProps() {
  try {
    const found = await fetch("props", { headers: headers() });
    if (!found.ok) { say((await refusal(found)).message); return; }
    props = await found.json();
  } catch { isReached = false; say(LOST, "server"); return; }
  if ($("settings").classList.contains("asks")) $("settings").close();
  $("model").textContent = document.title = props.model_alias;
  say(props.chat_template_caps.chat ? ""
    : "The model has no chat template: it goes on with what you write");
  drawNumbers();
  if (chat.leaf < 0) draw();
  else drawMeter();
}

// ------------------------------------------------------------------------------------- start

function listen() {
  $("send").onclick = send;
  $("stop").onclick = () => running?.stop.abort();
  $("new").onclick = startChat;
  $("list").onclick = () => showList(!document.body.classList.contains("lists"));
  $("show").onclick = () => { $("settings").showModal(); };
  $("settings").onclose = stopAsking;
  $("export").onclick = exportChats;
  $("import").onclick = () => $("file").click();
  $("file").onchange = () => { importChats($("file").files[0]); $("file").value = ""; };
  for (const id of ["system", "tools", "effort", "numbers"]) $(id).addEventListener("input", takeSettings);
  $("theme").onchange = takeTheme;
  $("key").onchange = () => { takeKey(); readProps(); };
  $("remember").onchange = takeKey;
  $("input").oninput = () => fit($("input"));
  $("input").onkeydown = onInputKey;
  $("page").onclick = ({ target }) => target.closest("#list") || showList(false);
  $("turns").onscroll = () => {
    const box = $("turns");
    follows = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  };
  tabs.onmessage = ({ data }) => takeOver(data);
  document.addEventListener("visibilitychange", look);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || $("settings").open) return;
    if (running) running.stop.abort();
    else if (document.body.classList.contains("lists")) { showList(false); $("list").focus(); }
  });
}

async function start() {
  $("theme").value = recall("localStorage", THEME) ?? "";
  takeTheme();
  $("remember").checked = Boolean(recall("localStorage", KEY));
  $("key").value = recall("sessionStorage", KEY) ?? recall("localStorage", KEY) ?? "";
  await openStore();
  const last = recall("sessionStorage", OPEN_CHAT);
  const found = chats.find((one) => one.id === last);
  if (found) show(found);
  else startChat();
  listen();
  look();
}

start();
