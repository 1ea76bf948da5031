"""What a pass reads and computes, experts included, and whether that is bound by memory or by arithmetic."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, product
from pathlib import Path

import pytest
import torch

from outrider.control.ceilings import ceilings_of, measure_ceilings
from outrider.control.costs import PassTable
from outrider.control.limits import Ceilings, PassLimits
from outrider.runners.pass_work import Experts, PassWork, decoder_work
from outrider.testing.synthetic import synthetic_pair, weight_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize(("count", "per_token"), [(2, 1), (4, 1), (4, 2), (5, 3), (6, 2)])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_distinct_experts_by_enumeration(count: int, per_token: int, rows: int):
    """Every way in which rows can choose their experts, each as likely."""
    choices = list(combinations(range(count), per_token))
    ways = [len(set().union(*way)) for way in product(choices, repeat=rows)]
    assert Experts(count, per_token).distinct(rows) == pytest.approx(float(Fraction(sum(ways), len(ways))), abs=1e-12)


def test_a_mixture_reads_more_weights_with_more_rows_and_computes_with_those_each_row_chooses():
    work = PassWork(100, 200, Experts(8, 2), expert_weights=800, expert_bytes=1600)
    assert work.bytes_read(1) == pytest.approx(200 + 1600 * 2 / 8)
    assert work.bytes_read(2) == pytest.approx(200 + 1600 * (1 - 0.75**2))
    assert work.bytes_read(100) == pytest.approx(200 + 1600)
    assert work.operations(3) == 2 * 3 * (100 + 800 * 2 / 8)


def test_between_measured_passes_time_grows_with_the_experts_read():
    """A machine that takes a second an expert: all passes follow from those of one, four and eight rows."""
    experts = Experts(16, 2)
    seconds = {(1, rows): 3.0 + experts.distinct(rows) for rows in (1, 4, 8)}
    table = PassTable(seconds, experts=experts)
    for rows in range(1, 40):
        assert table.rows_seconds(rows) == pytest.approx(3.0 + experts.distinct(rows))
    assert PassTable(seconds).rows_seconds(2) < 3.0 + experts.distinct(2) - 0.1  # a straight line lies below
    assert table.rows_seconds(10**6) == pytest.approx(3.0 + 16)


def test_few_rows_are_bound_by_memory_and_many_by_arithmetic():
    """1000 weights of 2 bytes at 10 bytes a second, 2000 operations a row at 80 a second."""
    limits = PassLimits(PassWork(1000, 2000), Ceilings(10.0, 80.0))
    few, many = limits.describe(4), limits.describe(12)
    assert (few["bound"], few["reading_seconds"], few["computing_seconds"]) == ("memory", 200.0, 100.0)
    assert (many["bound"], many["reading_seconds"], many["computing_seconds"]) == ("compute", 200.0, 300.0)


def test_work_of_a_decoder_is_that_of_its_matrices():
    decoder = synthetic_pair("tiny").target
    count = weight_bytes(decoder) // 4
    assert decoder_work(decoder.config, 4) == PassWork(count, 4 * count)


def test_ceilings_are_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = ceilings_of(CPU, torch.float32, tmp_path, "this machine")
    assert first is not None
    assert min(first.bandwidth, first.arithmetic) > 1e6
    asked: list[torch.dtype] = []
    fake = Ceilings(1.0, 2.0)
    monkeypatch.setattr("outrider.control.ceilings.measure_ceilings", lambda device, dtype: asked.append(dtype) or fake)
    assert ceilings_of(CPU, torch.float32, tmp_path, "this machine") == first
    assert not asked
    assert ceilings_of(CPU, torch.float32, tmp_path, "another machine") == fake
    assert ceilings_of(CPU, torch.bfloat16, tmp_path, "this machine") == fake
    assert asked == [torch.float32, torch.bfloat16]


def test_what_was_kept_and_cannot_be_read_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake = Ceilings(1.0, 2.0)
    monkeypatch.setattr("outrider.control.ceilings.measure_ceilings", lambda device, dtype: fake)
    assert ceilings_of(CPU, torch.float32, tmp_path, "facts") == fake
    (file,) = tmp_path.iterdir()
    for text in ("", "[1.0]", "[-1, 2]", '{"seconds": []}', '["x", 2]'):
        file.write_text(text)
        assert ceilings_of(CPU, torch.float32, tmp_path, "facts") == fake


def test_where_memory_is_short_ceilings_are_unknown(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object, **named: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("torch.empty_like", refuse)
    assert measure_ceilings(CPU, torch.float32) is None
