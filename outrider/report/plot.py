"""Plots as SVG, without a library: lines, bars, stacked bars. What is drawn carries its value as a tooltip."""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.report.numbers import digits
from outrider.report.page import Html

# Of medium brightness, readable on dark and on light pages.
COLORS = ("#3b82f6", "#1f9d3a", "#b8860b", "#c2410c", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
WIDTH, HEIGHT = 680, 240
LEFT, RIGHT, ROW = 52, 16, 17
LETTER = 6.8  # width of a letter, rounded up
MAX_POINTS = 60  # a line with more points has no dots
MAX_LETTERS = 40

Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Line:
    """One series of points; ranges: low and high for each point, drawn as a band."""

    name: str
    points: Seq[tuple[float, float]]
    ranges: Seq[tuple[float, float]] = ()


@dataclass(frozen=True, slots=True)
class Bars:
    """One series of values, one for each name of the plot."""

    name: str
    values: Seq[float]


@dataclass(frozen=True, slots=True)
class Mark:
    """A named line across the plot, at a value of one of its axes."""

    name: str
    x: float | None = None
    y: float | None = None


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where the plot lies in the picture, and the bounds of its axes."""

    top: float
    left: float
    right: float
    low: float
    high: float
    log: bool = False

    @property
    def bottom(self) -> float:
        return self.top + HEIGHT

    def x(self, value: float) -> float:
        left, right, at = (math.log2(v) if self.log else v for v in (self.left, self.right, value))
        return round(LEFT + (at - left) / (right - left) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        return round(self.bottom - (value - self.low) / (self.high - self.low) * HEIGHT, 1)


def line_plot(
    title: str, lines: Seq[Line], *, across: str, marks: Seq[Mark] = (), log: bool = False, zero: bool = False
) -> Html:
    """Series over a common axis. across: the name of that axis. log: it doubles at every step; its values are above
    0. zero: the upward axis begins at 0. Series without points are left out; without any the plot is empty."""
    lines = [line for line in lines if line.points]
    across_values = [x for line in lines for x, _ in line.points] or [1.0, 2.0]
    values = [y for line in lines for y in (*(y for _, y in line.points), *(v for pair in line.ranges for v in pair))]
    values += [mark.y for mark in marks if mark.y is not None] + ([0.0] if zero else [])
    if log and min(across_values) <= 0:
        raise ValueError(f"a plot whose axis doubles holds no value of {min(across_values)}")
    legend, top = _legend([line.name for line in lines])
    ticks = _ticks(*_bounds(values or [0.0, 1.0]))
    left, right = _bounds(across_values) if not log else _log_bounds(across_values)
    frame = _Frame(top, left, right, ticks[0], ticks[-1], log)
    steps = _powers(left, right) if log else [t for t in _ticks(left, right) if left <= t <= right]
    if all(float(x).is_integer() for x in across_values):  # nothing lies between two positions
        steps = [step for step in steps if step.is_integer()]
    parts = [*legend, *_levels(frame, ticks)]
    parts += [_text(frame.x(step), frame.bottom + 15, f"{step:.6g}", "middle") for step in steps]
    parts.append(_text(WIDTH - RIGHT, frame.bottom + 31, across, "end"))
    parts += [part for mark in marks for part in _mark(frame, mark)]
    for i, line in enumerate(lines):
        parts += _series(frame, line, COLORS[i % len(COLORS)])
    return _svg(title, parts, frame.bottom + 40)


def bar_plot(title: str, names: Seq[str], bars: Seq[Bars], *, across: str = "", show: Format = digits) -> Html:
    """A group of bars for each name, one for each series, from 0 up. show: how a value is written."""
    _check(names, bars)
    legend, top = _legend([each.name for each in bars] if len(bars) > 1 else [])
    ticks = _ticks(*_bounds([0.0, *(value for each in bars for value in each.values)]))
    frame = _Frame(top, 0, max(1, len(names)), ticks[0], ticks[-1])
    group = frame.x(1) - frame.x(0)
    width = group * 0.7 / max(1, len(bars))
    parts = [*legend, *_levels(frame, ticks)]
    for k, name in enumerate(names):
        middle = frame.x(k + 0.5)
        parts.append(_text(middle, frame.bottom + 15, _short(name, int(group / LETTER)), "middle"))
        for i, each in enumerate(bars):
            value, x = each.values[k], middle + (i - len(bars) / 2) * width
            y, base = frame.y(max(value, 0)), frame.y(min(value, 0))
            shown = f"{name}, {each.name}: {show(value)}"
            parts.append(_box((x, y, width * 0.94, base - y), COLORS[i % len(COLORS)], shown))
            if len(names) * len(bars) <= 16:
                parts.append(_text(x + width * 0.47, y - 4, show(value), "middle"))
    parts.append(_text(WIDTH - RIGHT, frame.bottom + 31, across, "end"))
    return _svg(title, parts, frame.bottom + (40 if across else 24))


def stacked_bars(
    title: str, names: Seq[str], bars: Seq[Bars], *, show: Format = digits, limit: Mark | None = None
) -> Html:
    """A row for each name, with the values of all series one after another and their sum behind. No value is negative.
    limit: a mark at its x, such as the memory of a device."""
    _check(names, bars)
    if any(value < 0 for each in bars for value in each.values):
        raise ValueError("stacked bars hold no negative values")
    legend, top = _legend([each.name for each in bars])
    sums = [sum(each.values[k] for each in bars) for k in range(len(names))]
    longest = max([*sums, limit.x or 0.0 if limit else 0.0]) or 1.0
    left = 12 + LETTER * min(MAX_LETTERS, max(map(len, names), default=0))
    scale = (WIDTH - left - RIGHT - LETTER * max((len(show(each)) for each in sums), default=0) - 6) / longest
    parts = list(legend)
    for k, name in enumerate(names):
        x, y = left, top + 30 * k
        parts.append(_text(left - 8, y + 15, _short(name), "end"))
        for i, each in enumerate(bars):
            width = each.values[k] * scale
            shown = f"{name}, {each.name}: {show(each.values[k])}"
            parts += [_box((x, y, width, 22), COLORS[i % len(COLORS)], shown)] if width else []
            x += width
        parts.append(_text(x + 6, y + 15, show(sums[k])))
    bottom = top + 30 * len(names)
    if limit is not None and limit.x is not None:
        x = round(left + limit.x * scale, 1)
        parts.append(_rule(x, x, top - 4, bottom))
        parts.append(_text(x, bottom + 12, limit.name, "end" if x > WIDTH / 2 else "start"))
        bottom += 12
    return _svg(title, parts, bottom + 8)


def _svg(title: str, parts: Seq[str], height: float) -> Html:
    name, height = html.escape(title), round(height)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{name}" font-family="system-ui, sans-serif" font-size="11" fill="currentColor">'
    )
    text = f'<text x="0" y="14" font-size="13" font-weight="600">{name}</text>'
    return Html("\n".join([head, text, *parts, "</svg>\n"]))


def _check(names: Seq[str], bars: Seq[Bars]) -> None:
    for each in bars:
        if len(each.values) != len(names):
            raise ValueError(f"{each.name}: {len(each.values)} values for {len(names)} names")


def _short(name: str, letters: int = MAX_LETTERS) -> str:
    return name if len(name) <= letters else name[: max(0, letters - 1)] + "…"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _box(place: tuple[float, float, float, float], color: str, shown: str) -> str:
    x, y, width, height = (round(each, 1) for each in place)
    title = f"<title>{html.escape(shown)}</title>"
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{color}">{title}</rect>'


def _rule(x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line x1="{x1}" x2="{x2}" y1="{y1}" y2="{y2}" stroke="currentColor" opacity=".6" stroke-dasharray="4 3"/>'


def _legend(names: Seq[str]) -> tuple[list[str], float]:
    """The names with their colours, in as many rows as they need, and where the plot begins below them."""
    parts, x, y = [], 0.0, 32.0
    for i, name in enumerate(map(_short, names)):
        width = 24 + LETTER * len(name)
        if x and x + width > WIDTH:
            x, y = 0.0, y + ROW
        parts.append(f'<rect x="{x:.1f}" y="{y - 9}" width="10" height="10" fill="{COLORS[i % len(COLORS)]}"/>')
        parts.append(_text(x + 14, y, name))
        x += width + 8
    return parts, (y + 18 if names else 34.0)


def _levels(frame: _Frame, ticks: Seq[float]) -> list[str]:
    """A thin line at each tick of the upward axis, and its value."""
    parts = []
    for tick in ticks:
        y = frame.y(tick)
        parts += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="currentColor" opacity=".15"/>',
            _text(LEFT - 6, y + 4, f"{tick:.6g}", "end"),
        ]
    return parts


def _mark(frame: _Frame, mark: Mark) -> list[str]:
    if mark.y is not None:
        y = frame.y(mark.y)
        return [_rule(LEFT, WIDTH - RIGHT, y, y), _text(WIDTH - RIGHT, y - 4, mark.name, "end")]
    if mark.x is None or not frame.left <= mark.x <= frame.right:
        return []
    x = frame.x(mark.x)
    at_end = x > WIDTH / 2
    label = _text(x - 5 if at_end else x + 5, frame.top + 10, mark.name, "end" if at_end else "start")
    return [_rule(x, x, frame.top, frame.bottom), label]


def _series(frame: _Frame, line: Line, color: str) -> list[str]:
    """A line, its band, and a dot for each point, unless there are very many."""
    places = [(frame.x(x), frame.y(y)) for x, y in line.points]
    drawn = " ".join(f"{x},{y}" for x, y in places)
    parts = []
    if line.ranges:
        ends = list(zip(line.points, line.ranges, strict=True))
        band = [(frame.x(x), frame.y(low)) for (x, _), (low, _) in ends]
        band += [(frame.x(x), frame.y(high)) for (x, _), (_, high) in reversed(ends)]
        parts.append(f'<polygon points="{" ".join(f"{x},{y}" for x, y in band)}" fill="{color}" opacity=".18"/>')
    parts.append(f'<polyline points="{drawn}" fill="none" stroke="{color}" stroke-width="1.8"/>')
    if len(places) <= MAX_POINTS:
        for (x, y), (at, value) in zip(places, line.points, strict=True):
            shown = html.escape(f"{line.name}, {digits(at)}: {digits(value)}")
            parts.append(f'<circle cx="{x}" cy="{y}" r="2.6" fill="{color}"><title>{shown}</title></circle>')
    return parts


def _bounds(values: Seq[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _log_bounds(values: Seq[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low / 2, high * 2)


def _powers(low: float, high: float) -> list[float]:
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    every = 1 + (last - first) // 12
    return [2.0**k for k in range(first, last + 1, every)]


def _ticks(low: float, high: float) -> list[float]:
    """Round values from at most `low` to at least `high`, about five, in steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(each for each in (1, 2, 5, 10) if each * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]
