import assert from "node:assert/strict";
import test from "node:test";

const { parseBlocks } = await import(process.env.PAGE + "/markdown.js");
const { MarkdownStream } = await import(process.env.PAGE + "/markdown_stream.js");

/** The blocks in short: no line numbers. */
function short(block) {
  const { line: _, closed: __, continued: ___, ...rest } = block;
  if (rest.blocks) rest.blocks = rest.blocks.map(short);
  if (rest.items) rest.items = rest.items.map((item) => item.blocks.map(short));
  return rest;
}
const blocks = (text) => parseBlocks(text.split("\n")).map(short);
const p = (text) => ({ type: "paragraph", text });
const list = (items, start = 1, ordered = false) => ({ type: "list", ordered, start, items });

const CASES = {
  "one\ntwo\n\nthree": [p("one\ntwo"), p("three")],
  "# One\n### Two ##\n#no\ntext": [
    { type: "heading", level: 1, text: "One" },
    { type: "heading", level: 3, text: "Two" },
    p("#no\ntext"),
  ],
  "a\n---\n* * *\nb": [p("a"), { type: "rule" }, { type: "rule" }, p("b")],
  "a\n```js\nlet x;\n\n  y\n```\nb": [p("a"), { type: "code", language: "js", text: "let x;\n\n  y" }, p("b")],
  "````\n```\n````": [{ type: "code", language: "", text: "```" }],
  "~~~py title\nx": [{ type: "code", language: "py", text: "x" }],
  "> a\n> > b\nlazy\n\nc": [
    { type: "quote", blocks: [p("a"), { type: "quote", blocks: [p("b\nlazy")] }] },
    p("c"),
  ],
  "- a\n- b\n  more\n\n- c\nd\n\ne": [list([[p("a")], [p("b\nmore")], [p("c\nd")]]), p("e")],
  "3. a\n4) b\n- c": [list([[p("a")], [p("b")]], 3, true), list([[p("c")]])],
  "1. a\n  - x\n  - y\n2. b": [list([[p("a"), list([[p("x")], [p("y")]])], [p("b")]], 1, true)],
  "- a\n\n  ```\n  code\n    in\n  ```\n- b": [
    list([[p("a"), { type: "code", language: "", text: "code\n  in" }], [p("b")]]),
  ],
  "| a | b |\n|:--|--:|\n| 1 | x \\| y |\n| 2 |\nend": [
    { type: "table", aligns: ["left", "right"], head: ["a", "b"], rows: [["1", "x | y"], ["2", ""]] },
    p("end"),
  ],
  "text\na | b\n:-: | -\n1 | 2": [
    p("text"),
    { type: "table", aligns: ["center", ""], head: ["a", "b"], rows: [["1", "2"]] },
  ],
  "a | b\n---": [p("a | b"), { type: "rule" }],
  "<script>x</script>": [p("<script>x</script>")],
};

for (const [text, want] of Object.entries(CASES)) {
  test(`blocks: ${JSON.stringify(text)}`, () => assert.deepEqual(blocks(text), want));
}

test("lists and quotes deeper than anybody writes them end as text", () => {
  assert.equal(blocks(">".repeat(5000) + " a").length, 1);
  assert.equal(blocks("- ".repeat(5000) + "a").length, 1);
});

/** What a stream says in the end, lists that were settled in parts made whole. */
function streamed(pieces) {
  const stream = new MarkdownStream();
  let longest = 0;
  for (const piece of pieces) {
    stream.push(piece);
    longest = Math.max(longest, stream.unsettled);
  }
  stream.end();
  assert.deepEqual(stream.tail, []);
  const whole = [];
  for (const block of stream.settled) {
    if (block.continued) whole.at(-1).items.push(...short(block).items);
    else whole.push(short(block));
  }
  return { whole, longest };
}

test("any single cut, and one character at a time, give the blocks of the whole", () => {
  for (const [text, want] of Object.entries(CASES)) {
    for (let cut = 0; cut <= text.length; cut += 1) {
      assert.deepEqual(streamed([text.slice(0, cut), text.slice(cut)]).whole, want, `${text} cut at ${cut}`);
    }
    assert.deepEqual(streamed([...text]).whole, want, text);
  }
});

const LONG = [
  "# Title\n\n" + "Some words with **bold** text in a line of its own.\n\n".repeat(40),
  "```python\n" + "value = compute(value)\n".repeat(200) + "```\n\n",
  Array.from({ length: 300 }, (_, i) => `${i + 1}. item number ${i}\n   - nested\n`).join(""),
  "\nThe end.\n",
].join("");

test("a long answer is parsed in short pieces", () => {
  const tokens = LONG.match(/[\s\S]{1,4}/g);
  assert.ok(tokens.length > 4000);
  const { whole, longest } = streamed(tokens);
  assert.deepEqual(whole, blocks(LONG));
  assert.ok(longest < 200, `${longest} characters were parsed again`); // a paragraph, an item, or a line of code
});

test("a code block keeps its identity while it grows", () => {
  const stream = new MarkdownStream();
  stream.push("```\none\n");
  const [block] = stream.tail;
  stream.push("two\n");
  assert.equal(stream.tail[0], block);
  assert.equal(block.text, "one\ntwo");
  stream.push("```\n");
  assert.equal(stream.settled[0], block);
});

test("marks whose meaning is not known yet are not shown", () => {
  for (const [text, tail] of [["a\n\n#", []], ["a\n\n- ", []], ["a\n\n``", []], ["a\n\n| x | y |\n", []], ["a\n\n- b", [list([[p("b")]])]]]) {
    const stream = new MarkdownStream();
    stream.push(text);
    assert.deepEqual(stream.tail.filter((block) => block.text !== "a").map(short), tail, text);
  }
});
