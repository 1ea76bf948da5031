// Markdown that arrives in pieces. What can no longer change is settled and never parsed again. No DOM.

import { closesFence, openFence, parseBlocks } from "./markdown.js";

const BARE_MARK = /^\s*(?:#{1,6}|[-*+_]{1,3}|\d{1,9}[.)]?|`{1,2}|~{1,2}|>|[-*+] \*{1,2}|\|.*)\s*$/;

/**
 * `settled` are the blocks that stay as they are, in order; a list with `continued` goes on the list before it. `tail` are
 * the blocks of the rest, which may still change. A code block keeps its identity while its text grows.
 */
export class MarkdownStream {
  settled = [];
  tail = [];
  #lines = []; // complete lines of the rest
  #partial = ""; // the line that is still being written
  #code = null; // { block, fence }: the code block being written
  #continued = false; // whether the rest begins within a list that is settled in part

  /** Characters that the next text makes the parser read again. */
  get unsettled() {
    return this.#lines.reduce((sum, line) => sum + line.length + 1, this.#partial.length);
  }

  push(text) {
    const lines = (this.#partial + text).split("\n");
    this.#partial = lines.pop();
    for (const line of lines) this.#line(line.replace(/\r$/, ""));
    if (lines.length) this.#settle();
    this.#show(true);
  }

  /** Nothing more will come. */
  end() {
    if (this.#partial) this.#line(this.#partial);
    this.#partial = "";
    this.#show(false);
    this.#settleTail(this.tail.length);
  }

  #line(line) {
    if (this.#code) return this.#codeLine(line);
    this.#lines.push(line);
    const fence = openFence(line);
    if (!fence) return undefined;
    const blocks = parseBlocks(this.#lines); // the fence may lie within a list or quote
    const last = blocks.at(-1);
    if (last.type !== "code" || last.closed) return undefined;
    this.#settleTail(blocks.length - 1, blocks);
    const block = { type: "code", language: fence.language, text: "", closed: false };
    this.#code = { block, fence };
    this.#lines = [];
    return undefined;
  }

  #codeLine(line) {
    const { block, fence } = this.#code;
    if (!closesFence(line, fence)) {
      const text = line.slice(Math.min(fence.indent, line.length - line.trimStart().length));
      block.text += this.#code.begun ? `\n${text}` : text;
      this.#code.begun = true;
      return;
    }
    block.closed = true;
    this.settled.push(block);
    this.#code = null;
  }

  /** Settles every block that a later one follows, and every item of a list that a later one follows. */
  #settle() {
    if (this.#code) return;
    const blocks = parseBlocks(this.#lines);
    const last = blocks.at(-1);
    if (!last) {
      this.#lines = [];
      return;
    }
    this.#settleTail(blocks.length - 1, blocks);
    let from = last.line;
    if (last.type === "list" && last.items.length > 1) {
      from = last.items.at(-1).line;
      this.settled.push({ ...last, items: last.items.slice(0, -1), continued: this.#continued });
      this.#continued = true;
    }
    this.#lines = this.#lines.slice(from);
  }

  #settleTail(count, blocks = this.tail) {
    for (const block of blocks.slice(0, count)) {
      this.settled.push(this.#continued ? { ...block, continued: true } : block);
      this.#continued = false;
    }
    if (blocks === this.tail) this.tail = [];
  }

  /** The tail as it is now. While more is to come, marks whose meaning is not known yet are left out. */
  #show(more) {
    if (this.#code) {
      this.tail = [this.#code.block];
      return;
    }
    const held = more && BARE_MARK.test(this.#partial);
    let lines = this.#partial && !held ? [...this.#lines, this.#partial] : this.#lines;
    if (more && lines.length === 1 && lines[0].startsWith("|")) lines = []; // the head of a table, perhaps
    this.tail = parseBlocks(lines);
    if (this.tail.length && this.#continued) this.tail[0] = { ...this.tail[0], continued: true };
  }
}
