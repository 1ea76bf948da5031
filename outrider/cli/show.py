"""Drawing an answer: who brought each token shows in its colour. Text from a model is never trusted."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.segment import ControlType
from rich.text import Text

from outrider.core.errors import ConfigError

if TYPE_CHECKING:
    from outrider.checkpoints.storage import Progress
    from outrider.core.outputs import Origin, Provenance
    from outrider.engine.events import Event
    from outrider.engine.results import Result

# Of middling brightness, so that each can be read on a dark and on a light screen.
STYLES: dict[str, str] = {"accepted": "#1f9d3a", "recovered": "#b8860b", "bonus": "#3b82f6", "plain": ""}
MEANINGS = {"accepted": "accepted draft", "recovered": "corrected by the target", "bonus": "bonus", "plain": "plain"}
HELD_CELLS = 24  # a longer word, or text written without spaces, is not held back

# What moves the cursor, rings, or starts an escape sequence: C0 but newline and tab, DEL, and C1.
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_CONTROLS |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)

Styled = tuple[str, "Origin"]


def clean(text: str) -> str:
    """The same text with nothing in it that a terminal would obey: control characters become pictures of them."""
    return text.replace("\r\n", "\n").translate(_CONTROLS)


def legend() -> Text:
    """One line that says what each colour means."""
    line = Text()
    for origin, style in STYLES.items():
        line.append("■ ", style or "default").append(MEANINGS[origin], style or "default").append("   ")
    return line


def styled(pieces: Iterable[Styled]) -> Text:
    """Pieces of an answer as one text, for drawing it whole."""
    out = Text()
    for piece, origin in pieces:
        out.append(clean(piece), STYLES[origin])
    return out


class Wrapper:
    """Breaks a text between words while it comes. The word in the making waits for its end."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.column = 0
        self.gap = ""
        self.word = Text()

    def feed(self, piece: str, style: str) -> Text:
        """What may be drawn now that this piece has come."""
        ready = Text()
        for part in re.findall(r"\n|[^\S\n]+|\S+", piece.expandtabs(4)):
            if not part.isspace():
                self.word.append(part, style)
                if self.word.cell_len > HELD_CELLS:
                    self._place(ready)
                continue
            self._place(ready)
            if part == "\n":
                ready.append(part)
                self.column, self.gap = 0, ""
            else:
                self.gap += part
        return ready

    def flush(self) -> Text:
        """The word that was held back."""
        ready = Text()
        self._place(ready)
        return ready

    def _place(self, ready: Text) -> None:
        """Put the word in the making on this line, or on the next."""
        size = self.word.cell_len
        if size == 0:
            return
        if self.column and self.column + cell_len(self.gap) + size > self.width:
            ready.append("\n")
            self.column = 0
        else:
            ready.append(self.gap)
            self.column += cell_len(self.gap)
        ready.append_text(self.word)
        # The terminal itself breaks a word wider than a line. A line just filled is not yet a new one.
        self.column = (self.column + size - 1) % self.width + 1
        self.word, self.gap = Text(), ""


class Screen:
    """Where answers, figures and notes go.

    On a terminal with colours all but notes go to stdout. Otherwise stdout gets the plain
    text alone, and the figures go to stderr with the notes.
    """

    def __init__(self, *, no_color: bool = False) -> None:
        self.out = Console(no_color=no_color or None, highlight=False)
        self.notes = Console(stderr=True, no_color=no_color or None, highlight=False)
        self.coloured = self.out.is_terminal and self.out.color_system is not None and not self.out.no_color
        self.pieces: list[Styled] = []
        """The answer drawn last."""
        self._wrapper = Wrapper(self.out.width)
        self._open = self._passing = self._told_legend = False

    def event(self, event: Event) -> None:
        """Draw what a round brought; the first event of an answer opens it."""
        self._draw(event.pieces, event.provenance, event.text)

    def result(self, result: Result) -> None:
        """Draw a whole answer."""
        self._draw(result.pieces, result.provenance, result.text)
        self.end()

    def end(self) -> None:
        """Finish the answer's last line; what is drawn next is another answer."""
        if self.coloured:
            self.out.print(self._wrapper.flush(), soft_wrap=True)
        elif not (self.pieces and self.pieces[-1][0].endswith("\n")):
            self._write("\n")
        self._open = False

    def passing(self, text: str) -> None:
        """A note that the next one writes over; nothing where notes do not go to a terminal."""
        if self.notes.is_terminal:
            self.notes.print(Text(text, "dim"), end="\r")
            self._passing = True

    def figures(self, *parts: RenderableType) -> None:
        """Print figures, with a line of air around them."""
        (self.out if self.coloured else self.notes).print("", *parts, sep="\n")

    def say(self, name: str, rest: str) -> None:
        """Print a line of the command's own on stdout, its first words bold."""
        self.out.print(Text(clean(name), "bold").append(clean(rest), "not bold"), soft_wrap=True)

    def note(self, text: str, style: str = "dim") -> None:
        """Say something that is not part of any answer."""
        self.notes.print(Text(clean(text), style), soft_wrap=True)

    def picture(self, file: Path, title: str, *figures: RenderableType) -> None:
        """Save the answer drawn last, and figures, as an SVG picture of a terminal 100 columns wide."""
        console = Console(file=io.StringIO(), record=True, width=100, force_terminal=True, color_system="truecolor")
        console.print(Group(legend(), Text(), styled(self.pieces), Text(), *figures))
        # rich names fonts on somebody's server; a picture should fetch nothing
        svg = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title=title), flags=re.DOTALL)
        try:
            file.write_text(svg, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--svg {file}: {error.strerror or error}") from error

    def _draw(self, pieces: Seq[str], provenance: Seq[Provenance], text: str) -> None:
        """Draw pieces, then whatever of the text they leave out."""
        if not self._open:
            self._begin()
        rest = text[sum(len(piece) for piece in pieces) :]
        new: list[Styled] = [(piece, who.origin) for piece, who in zip(pieces, provenance, strict=True) if piece]
        if rest:
            new.append((rest, "plain"))
        self.pieces += new
        if not self.coloured:
            self._write(clean(text))
            return
        ready = Text()
        for piece, origin in new:
            ready.append_text(self._wrapper.feed(clean(piece), STYLES[origin]))
        if ready:
            self.out.print(ready, end="", soft_wrap=True)

    def _begin(self) -> None:
        if self._passing:
            self.notes.control(Control((ControlType.ERASE_IN_LINE, 2)))
            self._passing = False
        if self.coloured and not self._told_legend:
            self.out.print(legend(), "", sep="\n")
            self._told_legend = True
        self.pieces, self._wrapper, self._open = [], Wrapper(self.out.width), True

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


class _Bars:
    """A Progress that draws a bar for each step."""

    def __init__(self, drawn: RichProgress) -> None:
        self.drawn = drawn
        self.task: TaskID | None = None

    def start(self, label: str, total: int | None) -> None:
        self.task = self.drawn.add_task(Text(clean(label)).plain, total=total)

    def advance(self, amount: int) -> None:
        if self.task is not None:
            self.drawn.advance(self.task, amount)

    def done(self) -> None:
        if self.task is not None:
            self.drawn.remove_task(self.task)
        self.task = None


@contextmanager
def bars(console: Console) -> Iterator[Progress]:
    """Bars while something long goes on; they vanish at its end. Nothing where the console is no terminal."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(compact=True),
    )
    with RichProgress(*columns, console=console, transient=True, disable=not console.is_terminal) as drawn:
        yield _Bars(drawn)
