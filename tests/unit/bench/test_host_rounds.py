"""benchmarks/host_rounds.py at small sizes: every kind of round has a time, and every answer its rounds."""

from __future__ import annotations

import re

from benchmark_scripts import output_of


def test_every_kind_of_round_is_timed():
    options = ["--batches", "2", "--standing", "0", "0.9", "--tokens", "60", "--answers", "1"]
    printed = output_of("host_rounds.py", *options)
    table, _, answers = printed.partition("\n\n")
    times = {
        kind: (float(us), float(ratio)) for kind, us, ratio in re.findall(r"(\w+) +([\d.]+) \( *([\d.]+)\)", table)
    }
    assert {"plain", "lookup", "block", "first", "rest"} <= times.keys()
    assert times["plain"][1] == 1.0
    for us, ratio in times.values():
        assert abs(us / times["plain"][0] - ratio) < 0.02
    for kind in ("lookup", "block"):  # which are asked besides
        assert times[kind][0] > times["plain"][0]
    never, nearly_always = answers.splitlines()[1:]
    told = [sum(map(float, re.findall(r"[a-z+]+ ([\d.]+)", line))) for line in (never, nearly_always)]
    assert told[0] == 59  # a token each, behind the first
    assert told[1] < 40
