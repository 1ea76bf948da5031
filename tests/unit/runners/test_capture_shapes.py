"""Which shapes of pass are captured, and that whatever is served goes into one of them."""

import random
from itertools import pairwise
from math import ceil, log2

import pytest

pytest.importorskip("triton")

from outrider.kernels.batch import MAX_SEQUENCES, MAX_WIDTH
from outrider.kernels.triton_attention import MAX_ROW_SPLITS, choose_kv_splits
from outrider.runners.cuda_graphs import (
    MAX_ROWS,
    MIN_ROWS,
    WIDTHS,
    BatchShape,
    capture_shapes,
    packed_shapes,
    padded_shape,
    prompt_shapes,
    split_round,
)

CASES = [(1, 1), (1, 6), (3, 2), (8, 6), (32, 16), (100, 6), (128, 6), (128, 17), (256, 2), (500, 9), (7, 65)]


@pytest.mark.parametrize(("batch", "width"), CASES)
def test_every_batch_up_to_the_largest_has_a_shape_that_takes_it(batch: int, width: int):
    """By counting: the smallest power of two and the smallest width, unless that has too many rows or sequences."""
    there = set(capture_shapes(batch, width))
    for batched in range(1, batch + 1):
        for rows in range(1, min(width, WIDTHS[-1]) + 1):
            shape = BatchShape(2 ** ceil(log2(batched)), min(w for w in WIDTHS if w >= rows))
            assert shape == padded_shape(batched, rows)
            assert (shape in there) == (shape.rows <= MAX_ROWS and shape.batch <= MAX_SEQUENCES)


def test_the_shapes_are_what_was_asked_for_and_no_more():
    assert capture_shapes(2, 3) == [
        BatchShape(1, 1),
        BatchShape(1, 2),
        BatchShape(1, 4),
        BatchShape(2, 1),
        BatchShape(2, 2),
        BatchShape(2, 4),
    ]
    assert capture_shapes(1, 1) == [BatchShape(1, 1)]
    assert max(shape.rows for shape in capture_shapes(128, 6)) == 768
    assert max(shape.rows for shape in capture_shapes(128, 32)) == MAX_ROWS
    assert max(shape.rows for shape in capture_shapes(64, 32, max_rows=64)) == 64


@pytest.mark.parametrize(("batch", "width"), CASES)
def test_packed_shapes_have_fewer_rows_than_uniform_ones_and_are_few(batch: int, width: int):
    """Each has at most twice the rows of the next smaller one of its batch, beyond 64 rows half as many again."""
    uniform, packed = capture_shapes(batch, width), packed_shapes(batch, width)
    widest = max(shape.width for shape in uniform)
    narrow = min(8, widest)
    assert len({*packed}) == len(packed) <= 1.2 * len(uniform)
    for batched in {shape.batch for shape in uniform if shape.batch >= 4 and widest >= 4}:
        for widths in {widest} if batched > 64 else {narrow, widest}:
            rows = [shape.rows for shape in packed if (shape.batch, shape.width) == (batched, widths)]
            assert all(batched < n < batched * widths for n in rows)
            every = [batched, *rows, min(batched * widths, MAX_ROWS)]
            assert all(more <= max(16, (2 if n < 64 else 1.5) * n) for n, more in pairwise(every)), every
    assert {(s.width, s.outputs) for s in packed} <= {(widest, 0), (narrow, 0)}
    assert all(s.batch <= 64 for s in packed if s.width < widest)


def test_the_packed_shapes_of_a_small_service():
    assert [(s.batch, s.packed) for s in packed_shapes(16, 6)] == [(4, 16), (8, 16), (8, 32), (16, 32), (16, 64)]
    assert packed_shapes(64, 2) == packed_shapes(2, 16) == []


def test_one_sequence_of_any_width_goes_into_the_least_room():
    """Else a batch could be halved until nothing is left of it."""
    assert padded_shape(1, WIDTHS[-1]).rows <= MIN_ROWS


def test_what_passes_are_made_of_has_room_for_the_largest():
    assert WIDTHS[-1] <= MAX_WIDTH
    for shape in (*capture_shapes(MAX_SEQUENCES, WIDTHS[-1]), *packed_shapes(MAX_SEQUENCES, WIDTHS[-1])):
        assert shape.rows <= MAX_ROWS
        for kv_heads in (1, 2, 8, 32):
            splits, chunk = choose_kv_splits(shape.batch, shape.rows, kv_heads)
            assert splits >= 1
            assert chunk >= 1
            assert shape.rows * splits <= MAX_ROW_SPLITS


@pytest.mark.parametrize("width", [1, 2, 6, 7, 16, 32, 65])
def test_whatever_a_round_reads_is_captured_or_plain_and_never_captured_anew(width: int):
    """Rounds of up to 4 spans of any width: each span in one pass, each captured pass of a shape that is there."""
    there = {*capture_shapes(4, width), *prompt_shapes(width)}
    max_decode = padded_shape(1, min(width, WIDTHS[-1])).width
    rng = random.Random(width)
    for _ in range(500):
        rows = [rng.choice([1, 1, 2, 5, 8, 13, 20, 32, 33, 200]) for _ in range(rng.randint(1, 4))]
        groups = split_round(rows, max_decode, pinned=False)
        assert sorted(i for spans, _ in groups for i in spans) == [*range(len(rows))]
        for spans, captured in groups:
            widest = max(rows[i] for i in spans)
            assert not captured or padded_shape(len(spans), widest) in there
            assert captured or widest > max_decode


def test_a_single_short_prompt_is_captured_beside_texts_that_decode_and_several_share_a_plain_pass():
    assert split_round([1, 20, 3], 4, pinned=False) == [([1], True), ([0, 2], True)]
    assert split_round([20], 4, pinned=False) == [([0], True)]
    assert split_round([1, 20, 30], 4, pinned=False) == [([1, 2], False), ([0], True)]
    assert split_round([1, 40], 4, pinned=False) == [([1], False), ([0], True)]
    assert split_round([1, 4], 4, pinned=False) == [([0, 1], True)]


def test_pinned_rows_are_always_captured():
    assert split_round([1, 20, 30], 4, pinned=True) == [([1], True), ([2], True), ([0], True)]
