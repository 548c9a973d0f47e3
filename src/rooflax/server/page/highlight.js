// Colours for code: comments, strings, numbers, keywords and calls, of many languages alike.

const words = (text) => new Set(text.split(/\s+/));
const C_LIKE = words(`abstract as async auto await bool boolean break byte case catch chan char class
  const constexpr continue default defer delete do double dyn else enum export extends extern false
  final finally float fn for foreach from func function go if impl implements import in include
  instanceof int interface let long loop match mod module move mut namespace new nil null nullptr of
  operator override package pass private protected pub public range readonly ref return select self
  short signed sizeof static string struct super switch template this throw throws trait true try
  type typedef typename typeof undefined union unsigned unsafe use using val var virtual void volatile
  when where while with yield`);
const PYTHON = words(`False None True and as assert async await break case class continue def del elif
  else except finally for from global if import in is lambda match nonlocal not or pass raise return
  self try while with yield`);
const SHELL = words(`alias break case cd continue do done echo elif else end esac exit export false fi
  for function if in local nil require return select set shift source then true unless unset until
  while begin class def module null yes no on off`);
const SQL = words(`add all alter and any as asc avg begin between by case cast check commit constraint
  count create cross default delete desc distinct drop else end except exists false foreign from full
  group having if in index inner insert intersect into is join key left like limit max min not null
  offset on or order outer over partition primary references right rollback select set sum table then
  true union unique update using values view when where with local function nil while do
  return elseif repeat until for`);

const STRING = String.raw`"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?`;
const TRIPLE = String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|`;
const NUMBER = String.raw`\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\w*`;
const WORD = String.raw`[A-Za-z_$][\w$]*`;

// A language's comments and what else is text, its keywords, and whether their case matters.
const kind = (comment, text, keywords, anyCase = false) => ({
  find: new RegExp(`(${comment})|(${text})|(${NUMBER})|(${WORD})`, "g"), keywords, anyCase });
const KINDS = {
  c: kind(String.raw`//[^\n]*|/\*[^]*?(?:\*/|$)`, `${STRING}|` + "`(?:\\\\.|[^`\\\\])*`?", C_LIKE),
  python: kind("#[^\\n]*", TRIPLE + STRING, PYTHON),
  shell: kind(String.raw`(?<![^\s;])#[^\n]*`, STRING, SHELL),
  sql: kind(String.raw`--[^\n]*|/\*[^]*?(?:\*/|$)`, STRING, SQL, true),
  markup: kind(String.raw`<!--[^]*?(?:-->|$)`, STRING, new Set()),
};
const NAMES = {
  c: "c cc cpp c++ h hpp cs csharp css cuda d dart go golang java javascript js json json5 jsonc jsx " +
    "kotlin kt mjs objc php rs rust scala scss swift ts tsx typescript zig",
  python: "py python python3 pycon ipython starlark mojo",
  shell: "bash console dockerfile fish ini make makefile perl pl powershell r rb ruby sh shell toml " +
    "yaml yml zsh conf",
  sql: "haskell hs lua mysql postgres sql sqlite",
  markup: "html svg vue xhtml xml",
};
const BY_NAME = new Map(Object.entries(NAMES).flatMap(([name, all]) =>
  all.split(" ").map((each) => [each, KINDS[name]])));
const LONGEST = 50000; // characters; what is longer stays plain

// A code's text as nodes; a language that is not known stays plain.
export function highlighted(code, language) {
  const { find, keywords, anyCase } = BY_NAME.get(language.toLowerCase()) ?? {};
  if (!find || code.length > LONGEST) return [code];
  const nodes = [];
  let plain = 0;
  for (const found of code.matchAll(find)) {
    const [all, comment, text, number, word] = found;
    const isCall = word && code[found.index + all.length] === "(";
    const isKeyword = word && keywords.has(anyCase ? word.toLowerCase() : word);
    const name = comment ? "comment" : text ? "string" : number ? "number"
      : isKeyword ? "keyword" : isCall ? "called" : "";
    if (!name) continue;
    if (found.index > plain) nodes.push(code.slice(plain, found.index));
    const span = document.createElement("span");
    span.className = name;
    span.textContent = all;
    nodes.push(span);
    plain = found.index + all.length;
  }
  return [...nodes, code.slice(plain)];
}
