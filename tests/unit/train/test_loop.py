"""A run that was cut continues to the same weights; whatever ends a run leaves the last checkpoint."""

import errno
import itertools
import os
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from outrider.core.errors import ConfigError, OutriderError
from outrider.models.load import load_decoder
from outrider.train import loop
from outrider.train.block import BlockTrainConfig
from outrider.train.config import Sizes, TrainConfig
from outrider.train.corpus import load_corpus
from outrider.train.eagle3 import Eagle3TrainConfig
from outrider.train.files import DiskError
from outrider.train.loop import Silent, Trainer
from outrider.train.session import load_target, plan_block, plan_eagle3
from outrider.train.state import FILE
from outrider.train.target import TrainingTarget

CONFIG = BlockTrainConfig(
    length=64, block=3, layers=1, taps=(1,), markov_rank=4, draft_vocab=200, epochs=0.5, lr=3e-3, looks=4,
    step_tokens=192, save_seconds=0.0,
)  # fmt: skip


class Cut(Silent):
    """Interrupts behind a step."""

    def __init__(self, at):
        self.at = at

    def step(self, told):
        if told["step"] == self.at:
            raise KeyboardInterrupt


def make(target_folder, answers_folder, out, config=CONFIG, watcher=None):
    corpus, decoder = load_corpus(answers_folder), load_target(target_folder, "cpu")
    plan = plan_block(decoder, corpus, config)
    target = TrainingTarget(decoder, plan.config.taps)
    return Trainer(plan.recipe, target, corpus, config, out, asdict(config), watcher or Silent())


def weights(trainer):
    return {name: each.clone() for name, each in trainer.recipe.head.state_dict().items()}


def test_a_run_that_was_cut_continues_to_the_same_weights(target_folder, answers_folder, tmp_path):
    whole = make(target_folder, answers_folder, tmp_path / "whole")
    state = whole.run()
    for at in (2, 5):
        with pytest.raises(KeyboardInterrupt):
            make(target_folder, answers_folder, tmp_path / "cut", watcher=Cut(at)).run()
    last = make(target_folder, answers_folder, tmp_path / "cut")
    continued = last.run()
    assert continued.step == state.step > 5
    for name, each in weights(whole).items():
        assert torch.equal(each, weights(last)[name]), name
    told = [(each["step"], each["loss"]) for each in continued.history if "loss" in each]
    assert told == [(each["step"], each["loss"]) for each in state.history if "loss" in each], "each step is told once"


def test_training_lowers_the_loss(target_folder, answers_folder, tmp_path):
    state = make(target_folder, answers_folder, tmp_path, replace(CONFIG, epochs=4.0)).run()
    losses = [each["l1"] for each in state.history if "loss" in each]
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    looks = [each for each in state.history if "tau" in each]
    assert looks[0]["step"] == 0
    assert looks[-1]["step"] == state.step
    assert looks[-1]["tau_sampled"] > looks[0]["tau_sampled"]


def test_accumulated_passes_are_one_step(target_folder, answers_folder, tmp_path):
    """Where passes are as long as the step, and where they are not, the first loss is about the same mean."""
    single = make(target_folder, answers_folder, tmp_path / "a", replace(CONFIG, pass_tokens=192)).run().history
    several = make(target_folder, answers_folder, tmp_path / "b", replace(CONFIG, pass_tokens=64)).run().history
    first = [next(each["ce"] for each in history if "ce" in each) for history in (single, several)]
    assert first[0] == pytest.approx(first[1], rel=0.1)


def test_a_full_disk_leaves_the_last_checkpoint(target_folder, answers_folder, tmp_path, monkeypatch):
    written, sync = [], os.fsync

    def full(handle):
        written.append(handle)
        if len(written) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskError, match=r"the disk is full.*--resume"):
        make(target_folder, answers_folder, tmp_path).run()
    monkeypatch.undo()
    assert [file.name for file in tmp_path.iterdir()] == [FILE]
    done = make(target_folder, answers_folder, tmp_path, watcher=Cut(4))
    with pytest.raises(KeyboardInterrupt):
        done.run()  # continues behind step 3


def test_a_loss_that_is_no_number_is_told(target_folder, answers_folder, tmp_path):
    trainer = make(target_folder, answers_folder, tmp_path)
    with torch.no_grad():
        trainer.recipe.head.fc.weight[0, 0] = torch.nan
    with pytest.raises(OutriderError, match=r"no number at step 1.*--lr"):
        trainer.run()


def test_a_run_of_other_options_is_not_continued(target_folder, answers_folder, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        make(target_folder, answers_folder, tmp_path, watcher=Cut(2)).run()
    with pytest.raises(ConfigError, match="other lr"):
        make(target_folder, answers_folder, tmp_path, replace(CONFIG, lr=1e-4)).run()
    (tmp_path / FILE).write_bytes(b"half")
    with pytest.raises(ConfigError, match="cannot be read"):
        make(target_folder, answers_folder, tmp_path).run()


def test_memory_that_runs_out_is_told(target_folder, answers_folder, tmp_path, monkeypatch):
    trainer = make(target_folder, answers_folder, tmp_path)

    def no_room(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(TrainingTarget, "read", no_room)
    with pytest.raises(ConfigError, match="--pass-tokens"):
        trainer.run()


def test_a_time_limit_ends_the_run_with_the_whole_schedule(target_folder, answers_folder, tmp_path, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(ticks)))  # a second at each look
    config = replace(CONFIG, epochs=1000.0, max_minutes=1.0)
    state = make(target_folder, answers_folder, tmp_path, config).run()
    assert 60 <= state.seconds < 66
    rates = [each["lr"] for each in state.history if "lr" in each]
    assert max(rates) > 0.9 * CONFIG.lr
    assert rates[-1] < 0.1 * CONFIG.lr


def test_the_rate_rises_then_falls():
    config = TrainConfig(lr=1.0, warmup=0.1)
    assert config.rate(0.05) == pytest.approx(0.5)
    assert config.rate(0.1) == pytest.approx(1.0)
    assert config.rate(0.55) == pytest.approx(0.5)
    assert config.rate(1.0) == pytest.approx(0.0, abs=1e-9)


def test_sizes_follow_the_collection():
    assert Sizes.of(TrainConfig(epochs=2), 10_000, 20_000, cuda=True) == Sizes(10_000, 8, 8, 2500, 10_000, 0)
    assert Sizes.of(TrainConfig(epochs=2), 10_000, 1001, cuda=True) == Sizes(10_000, 8, 8, 2500, 1000, 4)
    uneven = Sizes.of(TrainConfig(step_tokens=7168, pass_tokens=3072), 10_000, 3, cuda=True)
    assert (uneven.step_rows, uneven.pass_rows, uneven.kept_rows) == (9, 3, 9)
    small = Sizes.of(TrainConfig(length=512, epochs=1), 100, 100, cuda=False)
    assert (small.step_rows, small.pass_rows, small.steps) == (1, 1, 100)


def beginning(corpus, count):
    """Its first answers: a target reads all there are before the first step, which takes long in 16 bits on a CPU."""
    each = {name: getattr(corpus, name)[:count] for name in ("prompt_lens", "prompts", "kinds", "sampled")}
    return replace(corpus, starts=corpus.starts[: count + 1], **each)


@pytest.mark.parametrize("kind", ["block", "eagle3"])
def test_a_target_in_16_bits_trains_float32_weights_about_as_well(target_folder, answers_folder, tmp_path, kind):
    corpus, folder = beginning(load_corpus(answers_folder), 24), Path(target_folder)
    shared = {"length": 64, "taps": (1,), "draft_vocab": 200, "step_tokens": 192, "epochs": 1.0, "looks": 1}
    config = BlockTrainConfig(block=3, layers=1, **shared) if kind == "block" else Eagle3TrainConfig(steps=3, **shared)
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        decoder = load_decoder(folder, device="cpu", dtype=dtype)
        plan = (plan_block if kind == "block" else plan_eagle3)(decoder, corpus, config)
        target = TrainingTarget(decoder, plan.config.taps)
        state = Trainer(plan.recipe, target, corpus, config, tmp_path / str(dtype), asdict(config)).run()
        assert {each.dtype for each in plan.recipe.head.parameters()} == {torch.float32}
        losses.append([each["loss"] for each in state.history if "loss" in each])
    assert losses[1] == pytest.approx(losses[0], rel=0.03)
    assert losses[1] != losses[0]
