// Markdown to blocks. No DOM.
//
// A block is { type, line } and by type: heading { level, text }, paragraph { text }, code { language, text, closed },
// quote { blocks }, list { ordered, start, items: [{ line, blocks }] }, table { aligns, head, rows } or rule. `line` is
// the line it begins at. Texts within blocks are parsed by inline.js.

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*?))?(?:\s#+)?\s*$/;
const RULE = /^ {0,3}(?:-(?:\s*-){2,}|\*(?:\s*\*){2,}|_(?:\s*_){2,})\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(\s+|$)/;
const DELIMITER_ROW = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const MAX_DEPTH = 8; // of lists and quotes in one another; deeper ones are text

/** The blocks of these lines. */
export function parseBlocks(lines, depth = 0) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, next] = readBlock(lines, at, depth);
    blocks.push({ ...block, line: at });
    at = next;
  }
  return blocks;
}

/** The block that begins at a line, and the line after it. */
function readBlock(lines, at, depth) {
  const line = lines[at];
  const fence = openFence(line);
  if (fence) return readCode(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [{ type: "heading", level: heading[1].length, text: heading[2] ?? "" }, at + 1];
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) return readQuote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return readList(lines, at, depth);
  if (startsTable(lines, at)) return readTable(lines, at);
  return readParagraph(lines, at, depth);
}

/** The fence that a line opens, or null. */
export function openFence(line) {
  const match = FENCE.exec(line);
  return match && { indent: match[1].length, mark: match[2], language: match[3].trim().split(/\s+/)[0] };
}

/** Whether a line closes a fence. */
export function closesFence(line, { mark }) {
  const text = line.trim();
  return text.length >= mark.length && text === mark[0].repeat(text.length) && indentOf(line) < 4;
}

function readCode(lines, at, fence) {
  const end = lines.findIndex((line, i) => i > at && closesFence(line, fence));
  const inner = lines.slice(at + 1, end < 0 ? lines.length : end).map((line) => withoutIndent(line, fence.indent));
  const block = { type: "code", language: fence.language, text: inner.join("\n"), closed: end >= 0 };
  return [block, end < 0 ? lines.length : end + 1];
}

function readQuote(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && (QUOTE.test(lines[end]) || continues(lines, end, depth))) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [{ type: "quote", blocks: parseBlocks(inner, depth + 1) }, end];
}

function readList(lines, at, depth) {
  const ordered = isOrdered(lines[at]);
  const items = [];
  let next = at;
  while (next < lines.length && ITEM.test(lines[next]) && isOrdered(lines[next]) === ordered && !RULE.test(lines[next])) {
    const end = endOfItem(lines, next, depth);
    items.push({ line: next, blocks: itemBlocks(lines.slice(next, end), depth) });
    next = end;
    while (next < lines.length && !lines[next].trim()) next += 1; // blank lines between items
  }
  const start = ordered ? Number.parseInt(ITEM.exec(lines[at])[2], 10) : 1;
  return [{ type: "list", ordered, start, items }, next];
}

/** The line after an item: it goes on over indented lines, and over lines that continue its paragraph. */
function endOfItem(lines, at, depth) {
  const room = Math.min(2, contentColumn(lines[at]));
  let end = at + 1;
  while (end < lines.length) {
    const blank = !lines[end].trim();
    if (!blank && indentOf(lines[end]) < room && !(lines[end - 1].trim() && continues(lines, end, depth))) break;
    end += 1;
  }
  while (!lines[end - 1].trim()) end -= 1;
  return end;
}

function itemBlocks([first, ...rest], depth) {
  const column = contentColumn(first);
  return parseBlocks([first.slice(column), ...rest.map((line) => withoutIndent(line, column))], depth + 1);
}

/** The column where an item's text begins. */
function contentColumn(line) {
  const [, indent, mark, space] = ITEM.exec(line);
  return indent.length + mark.length + (space.length > 4 ? 1 : space.length);
}

function isOrdered(line) {
  return /\d/.test(ITEM.exec(line)[2]);
}

function startsTable(lines, at) {
  const delimiter = lines[at + 1] ?? "";
  if (!lines[at].includes("|") || !delimiter.includes("-") || !DELIMITER_ROW.test(delimiter)) return false;
  return cells(lines[at]).length === cells(delimiter).length;
}

function readTable(lines, at) {
  const aligns = cells(lines[at + 1]).map((cell) => {
    if (cell.endsWith(":")) return cell.startsWith(":") ? "center" : "right";
    return cell.startsWith(":") ? "left" : "";
  });
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const row = (line) => aligns.map((_, i) => cells(line)[i] ?? "");
  return [{ type: "table", aligns, head: row(lines[at]), rows: lines.slice(at + 2, end).map(row) }, end];
}

/** The cells of a row; `\|` is a bar within a cell. */
function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function readParagraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && continues(lines, end, depth)) end += 1;
  return [{ type: "paragraph", text: lines.slice(at, end).join("\n").trim() }, end];
}

/** Whether a line continues a paragraph: it is not blank and begins no block. */
function continues(lines, at, depth) {
  const line = lines[at];
  if (!line.trim() || openFence(line) || HEADING.test(line) || RULE.test(line)) return false;
  if (depth < MAX_DEPTH && (QUOTE.test(line) || ITEM.test(line))) return false;
  return !startsTable(lines, at);
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

function withoutIndent(line, count) {
  return line.slice(Math.min(count, indentOf(line)));
}
