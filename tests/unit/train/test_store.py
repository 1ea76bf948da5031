"""Kept outputs are what the target computes, and every row is used as often as the others."""

import numpy as np
import pytest
import torch

from outrider.train.config import Sizes, TrainConfig
from outrider.train.corpus import load_corpus
from outrider.train.loop import Feed
from outrider.train.packing import pack
from outrider.train.session import load_target
from outrider.train.store import KeptRows, row_bytes, rows_that_fit
from outrider.train.target import TrainingTarget


@pytest.fixture
def reader(target_folder, answers_folder):
    target = TrainingTarget(load_target(target_folder, "cpu"), (0, 2))
    return target, pack(load_corpus(answers_folder), np.arange(12), 64)


def test_kept_rows_are_what_the_target_reads(reader):
    target, packed = reader
    kept = KeptRows(target, packed, 4)
    kept.load(torch.tensor([5, 0, 3, 1]))
    rows, outputs = kept.take(torch.tensor([2, 0]))
    expected = target.read(packed.take(torch.tensor([3, 5])))
    assert torch.equal(rows.tokens, packed.tokens[[3, 5]])
    assert torch.equal(rows.in_answer, packed.in_answer[[3, 5]])
    for name in ("features", "hidden", "log_total"):
        torch.testing.assert_close(getattr(outputs, name), getattr(expected, name))
    logits = target.decoder.logits(expected.hidden)
    torch.testing.assert_close(outputs.log_total, logits.exp().sum(-1).log())
    assert torch.equal(outputs.best, logits.argmax(-1))


def test_memory_is_what_the_tensors_take(reader):
    target, packed = reader
    kept = KeptRows(target, packed, 3)
    tensors = [getattr(part, name) for part in (kept._rows, kept._outputs) for name in part.__dataclass_fields__]
    assert 3 * row_bytes(target, 64) == pytest.approx(sum(each.nbytes for each in tensors), rel=0.01)
    assert rows_that_fit(target, 64, 40 * row_bytes(target, 64)) == 10


class Counted:
    """In place of kept rows: remembers what was read."""

    def __init__(self):
        self.loaded = []

    def load(self, chosen):
        self.loaded.append(chosen.tolist())


@pytest.mark.parametrize(("rows", "fitting"), [(12, 12), (12, 5), (13, 4), (3, 100)])
def test_every_row_is_used_equally_often(rows, fitting):
    config = TrainConfig(length=64, step_tokens=128, epochs=24, reuse=3)
    sizes, kept = Sizes.of(config, rows, fitting, cuda=True), Counted()
    feed, used = Feed(kept, sizes, 0), np.zeros(rows, int)
    for step in range(sizes.steps):
        for slot in feed.slots(step).tolist():
            used[kept.loaded[-1][slot]] += 1
    assert len(kept.loaded) == (1 if fitting >= rows else -(-sizes.steps * sizes.step_rows // (sizes.kept_rows * 3)))
    assert sizes.kept_rows % sizes.step_rows == 0
    spread = 24 if len(kept.loaded) == 1 and rows % sizes.step_rows else 3
    assert used.sum() == sizes.steps * sizes.step_rows
    assert used.max() - used.min() <= spread, "a part more or less, or a row twice where steps do not divide them"


def test_a_step_takes_the_same_rows_in_whatever_order_steps_are_asked_for():
    sizes = Sizes.of(TrainConfig(length=64, step_tokens=128, epochs=9), 12, 6, cuda=True)
    told = []
    for order in (range(30), [29, 3, 17]):
        kept = Counted()
        feed = Feed(kept, sizes, 4)
        told.append({step: [kept.loaded[-1][slot] for slot in feed.slots(step).tolist()] for step in order})
    assert all(told[0][step] == rows for step, rows in told[1].items())
