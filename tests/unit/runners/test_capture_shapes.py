"""Which shapes of pass are captured, and that whatever is served goes into one of them."""

from math import ceil, log2

import pytest

pytest.importorskip("triton")

from outrider.kernels.batch import MAX_SEQUENCES, MAX_WIDTH
from outrider.kernels.triton_attention import MAX_ROW_SPLITS, choose_kv_splits
from outrider.runners.cuda_graphs import MAX_ROWS, MIN_ROWS, WIDTHS, BatchShape, capture_shapes, padded_shape

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


def test_one_sequence_of_any_width_goes_into_the_least_room():
    """Else a batch could be halved until nothing is left of it."""
    assert padded_shape(1, WIDTHS[-1]).rows <= MIN_ROWS


def test_what_passes_are_made_of_has_room_for_the_largest():
    assert WIDTHS[-1] <= MAX_WIDTH
    for shape in capture_shapes(MAX_SEQUENCES, WIDTHS[-1]):
        for kv_heads in (1, 2, 8, 32):
            splits, chunk = choose_kv_splits(shape.batch, shape.width, kv_heads)
            assert splits >= 1
            assert chunk >= 1
            assert shape.rows * splits <= MAX_ROW_SPLITS
