"""benchmarks/served_rounds.py at small sizes: every engine has a speed, and `auto` says what it chose."""

from __future__ import annotations

import re

from benchmark_scripts import output_of


def test_a_batch_is_served_by_every_engine():
    options = ["--batches", "2", "--standing", "0.9", "--texts", "2", "--lookups", "--plans", "1"]
    printed = output_of("served_rounds.py", *options)
    _, row, *plans = printed.splitlines()
    speeds, chosen = re.fullmatch(r" +2 +0.9 +\d+((?: +[\d.]+){3})  (.*)", row).groups()  # pyright: ignore[reportOptionalMemberAccess]
    seven, three, _ = map(float, speeds.split())
    assert seven > three > 1  # by the clock of the stand-ins: nearly all stands
    assert re.match(r"[a-z+]+ \d+ \d+%", chosen)
    assert len(plans) == 1
