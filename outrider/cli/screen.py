"""Terminal output: each token coloured by where it came from. Text from a model is never trusted."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
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

# Of medium brightness, readable on dark and on light screens.
STYLES: dict[str, str] = {"accepted": "#1f9d3a", "recovered": "#b8860b", "bonus": "#3b82f6", "plain": ""}
MEANINGS = {"accepted": "accepted draft", "recovered": "recovered by the target", "bonus": "bonus", "plain": "plain"}
TELL_SECONDS = 15.0  # between two lines of progress where stderr is no terminal
MAX_HELD_CELLS = 24  # longer words are printed before they are complete

# Control characters: C0 except newline and tab, DEL, and C1.
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_CONTROLS |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)

StyledPiece = tuple[str, "Origin"]


def clean(text: str) -> str:
    """The text with control characters replaced by their Unicode pictures."""
    return text.replace("\r\n", "\n").translate(_CONTROLS)


def legend() -> Text:
    """One line with the meaning of each colour."""
    line = Text()
    for origin, style in STYLES.items():
        line.append("■ ", style or "default").append(MEANINGS[origin], style or "default").append("   ")
    return line


def styled_text(pieces: Iterable[StyledPiece]) -> Text:
    """All pieces as one styled text."""
    out = Text()
    for piece, origin in pieces:
        out.append(clean(piece), STYLES[origin])
    return out


class WordWrapper:
    """Wraps streamed text between words. An incomplete word is held back until its end."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.column = 0
        self.gap = ""
        self.word = Text()

    def feed(self, piece: str, style: str) -> Text:
        """The text that is ready after this piece."""
        ready = Text()
        for part in re.findall(r"\n|[^\S\n]+|\S+", piece.expandtabs(4)):
            if not part.isspace():
                self.word.append(part, style)
                if self.word.cell_len > MAX_HELD_CELLS:
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
        """Put the held word on this line, or on the next."""
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
        # The terminal breaks a word wider than a line. A line that is just full has not wrapped yet.
        self.column = (self.column + size - 1) % self.width + 1
        self.word, self.gap = Text(), ""


class Screen:
    """Prints generated text, statistics and notes.

    On a terminal with colours, everything but notes goes to stdout. Otherwise stdout gets the
    plain text alone, and statistics go to stderr with the notes.
    """

    def __init__(self, *, no_color: bool = False) -> None:
        self.out = Console(no_color=no_color or None, highlight=False)
        self.notes = Console(stderr=True, no_color=no_color or None, highlight=False)
        self.coloured = self.out.is_terminal and self.out.color_system is not None and not self.out.no_color
        self.pieces: list[StyledPiece] = []
        """The text printed last."""
        self._wrapper = WordWrapper(self.out.width)
        self._open = self._transient = self._legend_shown = False

    def event(self, event: Event) -> None:
        """Print the text of an event. The first one, and the first after `end`, begins a new text."""
        self._draw(event.pieces, event.provenance, event.text)

    def result(self, result: Result) -> None:
        """Print a complete text."""
        self._draw(result.pieces, result.provenance, result.text)
        self.end()

    def end(self) -> None:
        """End the last line of the text. What is printed next is another text."""
        if self.coloured:
            self.out.print(self._wrapper.flush(), soft_wrap=True)
        elif not (self.pieces and self.pieces[-1][0].endswith("\n")):
            self._write("\n")
        self._open = False

    def transient_note(self, text: str) -> None:
        """A note that the next output overwrites; nothing where notes do not go to a terminal."""
        if self.notes.is_terminal:
            self.notes.print(Text(text, "dim"), end="\r")
            self._transient = True

    def print_stats(self, *parts: RenderableType) -> None:
        """Print tables of statistics after an empty line."""
        (self.out if self.coloured else self.notes).print("", *parts, sep="\n")

    def say(self, name: str, rest: str) -> None:
        """Print one line on stdout, with the name in bold."""
        self.out.print(Text(clean(name), "bold").append(clean(rest), "not bold"), soft_wrap=True)

    def note(self, text: str, style: str = "dim") -> None:
        """Print a line that is not part of any text, on stderr."""
        self.notes.print(Text(clean(text), style), soft_wrap=True)

    def save_svg(self, file: Path, title: str, *tables: RenderableType) -> None:
        """Save the text printed last, and tables, as an SVG picture of a terminal 100 columns wide."""
        console = Console(file=io.StringIO(), record=True, width=100, force_terminal=True, color_system="truecolor")
        console.print(Group(legend(), Text(), styled_text(self.pieces), Text(), *tables))
        # rich links to fonts on a server; the picture should fetch nothing
        svg = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title=title), flags=re.DOTALL)
        try:
            file.write_text(svg, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--svg {file}: {error.strerror or error}") from error

    def _draw(self, pieces: Seq[str], provenance: Seq[Provenance], text: str) -> None:
        """Print the pieces, then the rest of the text."""
        if not self._open:
            self._begin()
        rest = text[sum(len(piece) for piece in pieces) :]
        new: list[StyledPiece] = [(piece, who.origin) for piece, who in zip(pieces, provenance, strict=True) if piece]
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
        if self._transient:
            self.notes.control(Control((ControlType.ERASE_IN_LINE, 2)))
            self._transient = False
        if self.coloured and not self._legend_shown:
            self.out.print(legend(), "", sep="\n")
            self._legend_shown = True
        self.pieces, self._wrapper, self._open = [], WordWrapper(self.out.width), True

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


class _RichProgress:
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


def about(seconds: float) -> str:
    """An estimate of a time in words, rounded to 10 s or to minutes."""
    if seconds < 90:
        return f"about {max(1, round(seconds / 10)) * 10} s"
    return f"about {round(seconds / 60)} min"


def progress_line(screen: Screen, verb: str) -> Callable[[str, int, int], None]:
    """A function (next part, parts done, parts in all) that shows the progress and about how long the rest takes.
    verb: "done" or the like."""
    began, show = time.monotonic(), passing_line(screen)
    before: int | None = None  # parts done by an earlier run, whose time is unknown

    def tell(what: str, done: int, total: int) -> None:
        nonlocal before
        before = done if before is None else before
        passed = time.monotonic() - began
        left = f", {about(passed / (done - before) * (total - done))} left" if done > before else ""
        show(f"{done} of {total} {verb}, {passed:.0f} s{left}; now: {what}")

    return tell


def passing_line(screen: Screen) -> Callable[[str], None]:
    """A function that shows a line of progress: on a terminal each replaces the last; elsewhere at most one
    is printed every TELL_SECONDS."""
    told = -TELL_SECONDS

    def show(line: str) -> None:
        nonlocal told
        if screen.notes.is_terminal:
            screen.transient_note(f"{line:<100.100}")
        elif time.monotonic() - told > TELL_SECONDS:
            told = time.monotonic()
            screen.note(line)

    return show


@contextmanager
def progress_bars(console: Console) -> Iterator[Progress]:
    """A Progress that draws bars and removes them at the end; nothing where the console is no terminal."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(compact=True),
    )
    with RichProgress(*columns, console=console, transient=True, disable=not console.is_terminal) as drawn:
        yield _RichProgress(drawn)
