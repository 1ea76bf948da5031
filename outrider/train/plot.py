"""Line plots as SVG, without a library."""

from __future__ import annotations

import html
from collections.abc import Sequence as Seq
from dataclasses import dataclass

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 48, 120, 28, 32
COLORS = ("#3b82f6", "#1f9d3a", "#b8860b", "#c2410c", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
TICKS = 5


@dataclass(frozen=True, slots=True)
class Line:
    """One series of points."""

    name: str
    points: Seq[tuple[float, float]]


def svg_plot(title: str, lines: Seq[Line], *, across: str) -> str:
    """A plot of one or more series over a common axis. across: what that axis says. Series without points are left
    out; without any the plot is empty."""
    lines = [line for line in lines if line.points]
    everything = [point for line in lines for point in line.points] or [(0.0, 0.0), (1.0, 1.0)]
    left, right = _bounds([x for x, _ in everything])
    low, high = _bounds([y for _, y in everything])

    def place(x: float, y: float) -> tuple[float, float]:
        at = LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT)
        return round(at, 1), round(HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="currentColor">',
        f'<text x="{LEFT}" y="16" font-weight="600">{html.escape(title)}</text>',
    ]
    for i in range(TICKS):
        value, step = low + (high - low) * i / (TICKS - 1), left + (right - left) * i / (TICKS - 1)
        (x, _), (_, y) = place(step, low), place(left, value)
        parts += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="currentColor" opacity=".15"/>',
            f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{value:.3g}</text>',
            f'<text x="{x}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{step:.4g}</text>',
        ]
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{html.escape(across)}</text>')
    for i, line in enumerate(lines):
        color = COLORS[i % len(COLORS)]
        points = " ".join(f"{x},{y}" for x, y in (place(*point) for point in line.points))
        x, y = WIDTH - RIGHT + 8, TOP + 8 + 16 * i
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.8"/>',
            f'<line x1="{x}" x2="{x + 14}" y1="{y}" y2="{y}" stroke="{color}" stroke-width="2"/>',
            f'<text x="{x + 18}" y="{y + 4}">{html.escape(line.name)}</text>',
        ]
    return "\n".join([*parts, "</svg>\n"])


def _bounds(values: Seq[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
