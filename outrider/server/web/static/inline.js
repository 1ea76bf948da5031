// Markdown within a paragraph: text to a list of strings and nodes. No DOM.
//
// A node is { type: "strong" | "em" | "del", children }, { type: "link", href, children }, { type: "code", text } or
// { type: "break" }. Links lead to http and https only; an image is a link to it; HTML is text.

const SPECIAL = /[\\`*_~[\]!<h]/g;
const DESTINATION = /\(\s*<?([^\s()<>]*(?:\([^\s()]*\)[^\s()<>]*)*)>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/y;
const ADDRESS = /https?:\/\/[^\s<>"'`]+/y;
const BRACKETED = /<(https?:\/\/[^\s<>]+)>/y;
const BREAK = /<br\s*\/?>/iy;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const TYPES = { "**": "strong", __: "strong", "~~": "del", "*": "em", _: "em" };

/** The nodes of a text. With `open`, more text is to come: a `**` or backtick still open counts as closed at the end. */
export function parseInline(text, { open = false } = {}) {
  return new Scanner(text, open).nodes();
}

/** The text of nodes, without their marks. */
export function plainText(nodes) {
  return nodes.map((node) => {
    if (typeof node === "string") return node;
    if (node.type === "break") return "\n";
    return node.text ?? plainText(node.children);
  }).join("");
}

/** The address where it leads to http or https, else null. */
export function safeAddress(href) {
  if (!/^https?:\/\//i.test(href)) return null;
  try {
    return new URL(href).href;
  } catch {
    return null;
  }
}

class Scanner {
  at = 0;
  items = []; // nodes, strings, and delimiters { mark, opens, closes } that may become nodes
  brackets = []; // indexes in items of each "[" without its "]"
  unclosed = new Set(); // lengths of backtick runs that no later run closes

  constructor(text, open) {
    this.text = text;
    this.open = open;
  }

  nodes() {
    while (this.at < this.text.length) {
      SPECIAL.lastIndex = this.at;
      const next = SPECIAL.exec(this.text)?.index ?? this.text.length;
      if (next > this.at) this.items.push(this.text.slice(this.at, next));
      this.at = next;
      if (next < this.text.length) this.#special(this.text[next]);
    }
    return joined(emphasised(this.items, this.open));
  }

  #special(char) {
    if (char === "\\") return this.#escape();
    if (char === "`") return this.#code();
    if (char === "*" || char === "_" || char === "~") return this.#delimiter(char);
    if (char === "[" || (char === "!" && this.text[this.at + 1] === "[")) return this.#openBracket(char);
    if (char === "]") return this.#closeBracket();
    if (char === "<") return this.#angle();
    if (char === "h" && !/\w/.test(this.text[this.at - 1] ?? "")) return this.#address();
    return this.#take(1);
  }

  #take(length) {
    this.items.push(this.text.slice(this.at, this.at + length));
    this.at += length;
  }

  #match(pattern) {
    pattern.lastIndex = this.at;
    return pattern.exec(this.text);
  }

  #escape() {
    const next = this.text[this.at + 1] ?? "";
    if (next === "\n") this.items.push({ type: "break" });
    else this.items.push(ESCAPABLE.test(next) ? next : `\\${next}`);
    this.at += 2;
  }

  #code() {
    const run = /`+/y;
    run.lastIndex = this.at;
    const ticks = run.exec(this.text)[0];
    const start = this.at + ticks.length;
    let end = this.unclosed.has(ticks.length) ? -1 : this.#closing(ticks.length, start);
    if (end < 0) {
      this.unclosed.add(ticks.length);
      if (!this.open || start === this.text.length) return this.#take(ticks.length);
      end = this.text.length;
    }
    const inner = this.text.slice(start, end).replaceAll("\n", " ");
    const padded = /^ .*[^ ].* $/.test(inner);
    this.items.push({ type: "code", text: padded ? inner.slice(1, -1) : inner });
    this.at = end + ticks.length;
    return undefined;
  }

  /** Where the next run of exactly so many backticks begins; -1: nowhere. */
  #closing(length, from) {
    const run = /`+/g;
    run.lastIndex = from;
    for (let match = run.exec(this.text); match; match = run.exec(this.text)) {
      if (match[0].length === length) return match.index;
    }
    return -1;
  }

  #delimiter(char) {
    let length = 1;
    while (this.text[this.at + length] === char) length += 1;
    if (char === "~" && length !== 2) return this.#take(length);
    const [before, after] = [this.text[this.at - 1] ?? " ", this.text[this.at + length] ?? " "];
    const left = flanks(before, after);
    const right = flanks(after, before);
    const inWord = char === "_" && left && right; // snake_case is no emphasis
    const [opens, closes] = [left && !(inWord && /\w/.test(before)), right && !(inWord && /\w/.test(after))];
    this.items.push({ mark: char, length, opens, closes });
    this.at += length;
    return undefined;
  }

  #openBracket(char) {
    this.brackets.push(this.items.length);
    this.#take(char === "!" ? 2 : 1);
  }

  #closeBracket() {
    const from = this.brackets.pop();
    this.at += 1;
    const match = from === undefined ? null : this.#match(DESTINATION);
    const href = match && safeAddress(match[1]);
    if (!match) return this.items.push("]");
    const inside = emphasised(this.items.splice(from).slice(1), false);
    if (href) this.items.push({ type: "link", href, children: joined(inside) });
    else this.items.push(...inside); // an address of another kind: its text alone
    this.at += match[0].length;
    return undefined;
  }

  #angle() {
    const match = this.#match(BRACKETED);
    const href = match && safeAddress(match[1]);
    if (href) {
      this.items.push({ type: "link", href, children: [match[1]] });
      this.at += match[0].length;
      return undefined;
    }
    const line = this.#match(BREAK);
    if (!line) return this.#take(1);
    this.items.push({ type: "break" });
    this.at += line[0].length;
    return undefined;
  }

  #address() {
    const match = this.#match(ADDRESS);
    if (!match) return this.#take(1);
    let shown = match[0].replace(/[.,:;!?*_~]+$/, "");
    if (shown.endsWith(")") && !shown.includes("(")) shown = shown.replace(/\)+[.,:;!?]*$/, "");
    const href = safeAddress(shown);
    if (!href) return this.#take(match[0].length);
    this.items.push({ type: "link", href, children: [shown] });
    this.at += shown.length;
    return undefined;
  }
}

/** Whether a run of marks between these characters can open (seen from the left) or close (from the right). */
function flanks(before, after) {
  if (/\s/.test(after)) return false;
  return !/[\p{P}\p{S}]/u.test(after) || /[\s\p{P}\p{S}]/u.test(before);
}

/** The items with matching delimiters turned into nodes, the others into text. */
function emphasised(items, open) {
  const out = [];
  const openers = []; // indexes in out
  for (const item of items) {
    if (!item.mark) out.push(item);
    else close({ ...item }, out, openers);
  }
  if (open) closeStrong(out, openers);
  return out.map((item) => (item.mark ? item.mark.repeat(item.length) : item));
}

/** Closes what this delimiter closes; what is left of it may open, or stays as text. */
function close(delimiter, out, openers) {
  while (delimiter.closes && delimiter.length) {
    const place = openers.findLastIndex((index) => out[index].mark === delimiter.mark);
    if (place < 0) break;
    const [at] = openers.splice(place); // openers between the two are text
    const opener = out[at];
    const used = Math.min(2, opener.length, delimiter.length);
    const children = out.splice(at + 1).map((item) => (item.mark ? item.mark.repeat(item.length) : item));
    opener.length -= used;
    delimiter.length -= used;
    if (opener.length) openers.push(at);
    else out.pop();
    out.push({ type: TYPES[delimiter.mark.repeat(used)], children: joined(children) });
  }
  if (!delimiter.length) return;
  if (delimiter.opens) openers.push(out.length);
  out.push(delimiter);
}

/** The last `**` that is open, closed at the end: its text does not jump from plain to bold when the rest arrives. */
function closeStrong(out, openers) {
  const at = openers.findLast((index) => out[index].mark === "*" && out[index].length === 2);
  if (at === undefined || at === out.length - 1) return;
  const children = out.splice(at).slice(1).map((item) => (item.mark ? item.mark.repeat(item.length) : item));
  out.push({ type: "strong", children: joined(children) });
}

/** The nodes with neighbouring strings made one. */
function joined(nodes) {
  const out = [];
  for (const node of nodes) {
    if (typeof node === "string" && typeof out.at(-1) === "string") out.push(out.pop() + node);
    else if (node !== "") out.push(node);
  }
  return out;
}
