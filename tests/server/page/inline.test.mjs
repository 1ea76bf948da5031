import assert from "node:assert/strict";
import test from "node:test";

const { parseInline, plainText, safeAddress } = await import(process.env.PAGE + "/inline.js");

const strong = (...children) => ({ type: "strong", children });
const em = (...children) => ({ type: "em", children });
const code = (text) => ({ type: "code", text });
const link = (href, ...children) => ({ type: "link", href, children });

const CASES = {
  "plain text": ["plain text"],
  "a **b** c": ["a ", strong("b"), " c"],
  "*a* _b_ __c__ ~~d~~": [em("a"), " ", em("b"), " ", strong("c"), " ", { type: "del", children: ["d"] }],
  "***both***": [em(strong("both"))],
  "**a *b* c**": [strong("a ", em("b"), " c")],
  "**a": ["**a"],
  "2 * 3 * 4": ["2 * 3 * 4"],
  "snake_case_name and a_b": ["snake_case_name and a_b"],
  "*a **b*": ["*a *", em("b")],
  "`a*b*` and ``x ` y``": [code("a*b*"), " and ", code("x ` y")],
  "`` ` ``": [code("`")],
  "`open": ["`open"],
  "\\*no\\* \\q": ["*no* \\q"],
  "[a *b*](https://x.org/p_(1)) c": [link("https://x.org/p_(1)", "a ", em("b")), " c"],
  '[t](<https://x.org> "title")': [link("https://x.org/", "t")],
  "[a] (b) [c": ["[a] (b) [c"],
  "see https://x.org/a_b_c, ok": ["see ", link("https://x.org/a_b_c", "https://x.org/a_b_c"), ", ok"],
  "(https://x.org)": ["(", link("https://x.org/", "https://x.org"), ")"],
  "<https://x.org/> a<br>b": [link("https://x.org/", "https://x.org/"), " a", { type: "break" }, "b"],
  "![alt](https://x.org/i.png)": [link("https://x.org/i.png", "alt")],
  "<b>&amp;</b>": ["<b>&amp;</b>"],
  "the http and hot": ["the http and hot"],
};

for (const [text, nodes] of Object.entries(CASES)) {
  test(`inline: ${text}`, () => assert.deepEqual(parseInline(text), nodes));
}

test("links lead to http and https alone", () => {
  for (const href of ["javascript:alert(1)", "JaVaScRiPt:alert(1)", "data:text/html,x", "file:///etc", "//x.org", "/v1", "https://"]) {
    assert.equal(safeAddress(href), null, href);
    assert.deepEqual(parseInline(`[a](${href})`).filter((node) => node.type === "link"), [], href);
  }
  assert.deepEqual(parseInline("[run](javascript:x)"), ["run"]);
});

test("while more is to come, what is open counts as closed", () => {
  assert.deepEqual(parseInline("a **b", { open: true }), ["a ", strong("b")]);
  assert.deepEqual(parseInline("a `b", { open: true }), ["a ", code("b")]);
  assert.deepEqual(parseInline("a **", { open: true }), ["a **"]);
});

test("marks are gone from the plain text", () => {
  assert.equal(plainText(parseInline("**a** [b](https://x.org) `c`\\\nd")), "a b c\nd");
});

test("long rows of marks take no time that grows with their square", () => {
  const size = 200_000; // hours, were it quadratic
  for (const mark of ["*", "_ ", "`", "` ``", "[", "](", "[a](", "<", "**a", "https://", "\\"]) {
    const text = mark.repeat(size / mark.length);
    assert.ok(plainText(parseInline(text)).length > 0, mark);
  }
});
