"""One self-contained HTML page from sections of tables, text and plots."""

from __future__ import annotations

import html
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

Tone = Literal["good", "fair", "bad"]

# Nothing but the page's own styles: a page makes no request, and text that got in unescaped could run nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
# What is wider than the window scrolls, and a shadow lies at each edge behind which there is more of it: shadows stay
# at the edges, and covers that scroll with the content hide them at its ends.
STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #1f9d3a; --fair: #b8860b; --bad: #dc2626;
  --soft: color-mix(in srgb, Canvas, #888 7%); --edge: #888c }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; line-height: 1.25 } h2 { font-size: 1.15rem; margin-top: 2rem }
h1, h2, p, summary { overflow-wrap: anywhere } td { overflow-wrap: break-word }
.wide { margin: .5rem 0 1.25rem }
.wide, pre { overflow-x: auto; --ground: Canvas; --cover: linear-gradient(var(--ground) 0 0) }
.wide, pre { background-repeat: no-repeat; background-attachment: local, local, scroll, scroll;
  background-image: var(--cover), var(--cover), linear-gradient(to right, var(--edge), transparent),
    linear-gradient(to left, var(--edge), transparent);
  background-position: left, right, left, right; --less: calc(100% - 2px); /* covers may end within a pixel */
  background-size: 1.2rem 100%, 1.2rem 100%, 1.2rem var(--less), 1.2rem var(--less) }
svg { display: block; margin: 1rem 0; max-width: 100%; height: auto }
table { border-collapse: collapse } td, th { padding: .25rem .9rem .25rem 0; text-align: right; vertical-align: top }
td:first-child, th:first-child, td.told, table.text td, table.text th { text-align: left }
table:not(.text) td:not(:first-child, .told) { white-space: nowrap }
th { font-weight: 600 } tr + tr { border-top: 1px solid var(--line) } table { font-variant-numeric: tabular-nums }
code, pre { font: 13px/1.5 ui-monospace, monospace }
pre { padding: .6rem .8rem; --ground: var(--soft); background-color: var(--soft); border-radius: 4px }
.note, .told { opacity: .75 } details { margin: .4rem 0 } .prompt { white-space: pre-wrap; opacity: .75 }
.verdict { font-size: 1.1rem; padding: .7rem 1rem; border-left: 4px solid; background: var(--soft) }
.good { border-color: var(--good) } .fair { border-color: var(--fair) } .bad { border-color: var(--bad) }
"""


class Html(str):
    """Text that is HTML already, and taken as it is."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page under a title of its own; "" for none."""

    title: str
    parts: Seq[Html] = field(default_factory=tuple)


def page(title: str, sections: Seq[Section]) -> str:
    """The whole file. title: of the page, also shown as its heading."""
    body = [f"<h1>{html.escape(title)}</h1>"]
    for section in sections:
        body += [f"<h2>{html.escape(section.title)}</h2>"] if section.title else []
        body += section.parts
    name, text = html.escape(title), "\n".join(body)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{name}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{text}\n</body></html>\n"
    )


def escaped(text: str) -> Html:
    """The text as HTML; HTML as it is."""
    return text if isinstance(text, Html) else Html(html.escape(text))


def paragraph(text: str) -> Html:
    return Html(f"<p>{escaped(text)}</p>")


def note(text: str) -> Html:
    """A paragraph that explains: definitions, where numbers come from."""
    return Html(f'<p class="note">{escaped(text)}</p>')


def strong(text: str) -> Html:
    return Html(f"<b>{escaped(text)}</b>")


def join(*parts: str) -> Html:
    """Text and HTML in one line, such as a paragraph with a strong word."""
    return Html("".join(escaped(part) for part in parts))


def code(text: str) -> Html:
    """Commands or a file, to copy."""
    return Html(f"<pre>{escaped(text)}</pre>")


def verdict(text: str, tone: Tone) -> Html:
    """The answer that the page is about, in a word or a sentence."""
    return Html(f'<p class="verdict {tone}">{escaped(text)}</p>')


def details(summary: str, parts: Seq[Html], *, is_open: bool = False) -> Html:
    """Parts that fold away under a summary."""
    state = " open" if is_open else ""
    return Html(f"<details{state}><summary>{escaped(summary)}</summary>{''.join(parts)}</details>")


def table(head: Seq[str], rows: Seq[Seq[str]], *, text: bool = False, told: bool = False) -> Html:
    """A table: the first column is left-aligned, the others, for numbers, right-aligned. text: all are left-aligned.

    told: the last column holds explanations, and is left-aligned too.
    """
    kinds = [""] * (len(head) - told) + [' class="told"'] * told
    cells = "".join(f"<th>{escaped(each)}</th>" for each in head)
    lines = (
        "<tr>" + "".join(f"<td{kind}>{escaped(each)}</td>" for kind, each in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    kind = ' class="text"' if text else ""
    return Html(f'<div class="wide"><table{kind}><tr>{cells}</tr>{"".join(lines)}</table></div>')
