"""What the drafters' configurations share."""

from __future__ import annotations

from outrider.core.errors import ConfigError
from outrider.drafters.base import DrafterContext

_MIN_PROB_CPU = 0.25
_MIN_PROB = 0.1


def check_options(drafter: str, config: object, **ranges: tuple[float, float]) -> None:
    """Raise ConfigError for the first field outside its range; whole numbers where both bounds are."""
    for name, (low, high) in ranges.items():
        value = getattr(config, name)
        if name == "min_prob" and value is None:
            continue  # left open: see default_min_prob
        whole = isinstance(low, int) and isinstance(high, int)
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise ConfigError(f"{drafter}: {name} must be a {'whole ' if whole else ''}number, got {value!r}")
        if not low <= value <= high:
            raise ConfigError(f"{drafter}: {name} must be {low} to {high}, got {value}")


def default_min_prob(min_prob: float | None, context: DrafterContext) -> float:
    """The probability of acceptance below which a token is not worth proposing: as given, or by the device.

    It is what a row costs: on a CPU each further row of a pass adds about a fifth of a one-row
    pass, on an accelerator next to nothing.
    """
    if min_prob is not None:
        return min_prob
    return _MIN_PROB_CPU if str(context.device).startswith("cpu") else _MIN_PROB
