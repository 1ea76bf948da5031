"""Numbers as people read them: three digits and a unit."""

from __future__ import annotations

import math

MEMORY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def digits(value: float) -> str:
    """Three digits: 0.123, 1.23, 12.3, 123, 1,230,000. Never in powers of ten."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    places = 2 - math.floor(math.log10(abs(value)))
    rounded = round(value, places)
    return f"{rounded:,.0f}" if places <= 0 else f"{rounded:.{min(places, 6)}f}"


def count(value: int) -> str:
    """A whole number, in groups of three."""
    return f"{value:,}"


def memory(size: float) -> str:
    """Bytes, in powers of 1024: 1.50 GiB."""
    unit = 0
    while abs(size) >= 999.5 and unit < len(MEMORY_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{digits(size)} {MEMORY_UNITS[unit]}"


def seconds(value: float) -> str:
    """A time: 12.3 ms, 4.56 s, 2:05 min."""
    if value >= 119.5:
        whole = round(value)
        return f"{whole // 60}:{whole % 60:02} min"
    for scale, unit in TIME_UNITS:
        if abs(value) >= scale * 0.9995 or unit == "ns":
            return f"{digits(value / scale)} {unit}" if value else "0 s"
    raise ValueError(value)


def share(value: float) -> str:
    """A part of one, in percent: 12.3 %."""
    return f"{100 * value:.1f} %"


def times(value: float) -> str:
    """A factor: 1.52 x."""
    return f"{value:.2f} x"
