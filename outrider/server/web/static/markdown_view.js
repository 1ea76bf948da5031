// Markdown on the page as it arrives. What the model wrote becomes text nodes, never markup.

import { copyButton } from "./clipboard.js";
import { make } from "./dom.js";
import { parseInline } from "./inline.js";
import { MarkdownStream } from "./markdown_stream.js";

const TAGS = { strong: "strong", em: "em", del: "del" };

export class MarkdownView {
  #stream = new MarkdownStream();
  #drawn = 0; // settled blocks on the page
  #tail = []; // elements of blocks that may change
  #codes = new WeakMap(); // code block -> { element, text node }
  #frame = 0;

  constructor() {
    this.element = make("div", "markdown");
  }

  /** Adds text; the page shows it in its next frame. */
  push(text) {
    if (!text) return;
    this.#stream.push(text);
    this.#frame ||= requestAnimationFrame(() => this.#draw(true));
  }

  /** Nothing more will come. */
  end() {
    this.#stream.end();
    this.#draw(false);
  }

  #draw(open) {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const { settled, tail } = this.#stream;
    const kept = new Set([...tail, ...settled.slice(this.#drawn)].map((block) => this.#codes.get(block)?.element));
    for (const element of this.#tail) if (!kept.has(element)) element.remove();
    for (const block of settled.slice(this.#drawn)) this.#append(block, this.element, false);
    this.#drawn = settled.length;
    this.#tail = tail.map((block) => this.#append(block, this.element, open));
  }

  /** Appends a block and returns what can be removed again to redraw it. */
  #append(block, parent, open) {
    const list = parent.lastElementChild;
    if (block.continued && list?.localName === (block.ordered ? "ol" : "ul")) {
      const items = block.items.map((item) => this.#item(item, open));
      list.append(...items);
      return { remove: () => items.forEach((item) => item.remove()) };
    }
    const element = this.#element(block, open);
    if (element.parentElement !== parent) parent.append(element);
    return element;
  }

  #element(block, open) {
    switch (block.type) {
      case "heading":
        return inline(make(`h${Math.min(6, block.level + 3)}`, `heading-${block.level}`), block.text, open);
      case "code":
        return this.#code(block);
      case "quote":
        return this.#blocks(make("blockquote"), block.blocks, open);
      case "list": {
        const list = make(block.ordered ? "ol" : "ul");
        if (block.ordered && block.start !== 1) list.start = block.start;
        list.append(...block.items.map((item) => this.#item(item, open)));
        return list;
      }
      case "table":
        return table(block, open);
      case "rule":
        return make("hr");
      default:
        return inline(make("p"), block.text, open);
    }
  }

  #blocks(parent, blocks, open) {
    for (const block of blocks) this.#append(block, parent, open);
    return parent;
  }

  /** An item of one paragraph holds its text without a paragraph's margins. */
  #item({ blocks }, open) {
    const item = make("li");
    const [first, ...rest] = blocks;
    if (first?.type !== "paragraph") return this.#blocks(item, blocks, open);
    const task = /^\[([ xX])\]\s+/.exec(first.text);
    if (task) item.append(task[1] === " " ? "☐ " : "☑ ");
    inline(item, task ? first.text.slice(task[0].length) : first.text, open);
    return this.#blocks(item, rest, open);
  }

  /** A code block; while it grows, text is appended to the same element. */
  #code(block) {
    const known = this.#codes.get(block);
    if (known) {
      known.text.appendData(block.text.slice(known.text.length));
      return known.element;
    }
    const element = make("div", "code");
    const head = make("div", "code-head");
    head.append(make("span", "", block.language || "code"), copyButton("Copy", () => block.text));
    const pre = make("pre");
    pre.tabIndex = 0; // so that keys can scroll it
    pre.setAttribute("role", "region");
    pre.setAttribute("aria-label", block.language ? `Code, ${block.language}` : "Code");
    const text = document.createTextNode(block.text);
    const code = make("code");
    code.append(text);
    pre.append(code);
    element.append(head, pre);
    this.#codes.set(block, { element, text });
    return element;
  }
}

function table({ aligns, head, rows }, open) {
  const row = (texts, cell) => {
    const line = make("tr");
    line.append(...texts.map((text, i) => inline(make(cell, aligns[i]), text, open)));
    return line;
  };
  const [top, body] = [make("thead"), make("tbody")];
  top.append(row(head, "th"));
  body.append(...rows.map((texts) => row(texts, "td")));
  const whole = make("table");
  whole.append(top, body);
  const box = make("div", "table");
  box.tabIndex = 0;
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", "Table");
  box.append(whole);
  return box;
}

function inline(parent, text, open) {
  parent.append(...parseInline(text, { open }).map(nodeOf));
  return parent;
}

function nodeOf(node) {
  if (typeof node === "string") return document.createTextNode(node);
  if (node.type === "break") return make("br");
  if (node.type === "code") return make("code", "", node.text);
  const element = make(TAGS[node.type] ?? "a");
  if (node.type === "link") {
    element.href = node.href;
    element.target = "_blank";
    element.rel = "noopener noreferrer";
  }
  element.append(...node.children.map(nodeOf));
  return element;
}
