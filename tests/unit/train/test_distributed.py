"""Two processes train to the weights of one that runs all their passes."""

import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from outrider.core.errors import ConfigError
from outrider.train.config import Sizes, TrainConfig
from outrider.train.distributed import ALONE, Ranks, join_ranks
from outrider.train.loop import Feed

OPTIONS = ("--device", "cpu", "--length", "64", "--step-tokens", "256", "--pass-tokens", "64", "--epochs", "0.4",
           "--measured", "0", "--looks", "2", "--layers", "1", "--save-seconds", "0")  # fmt: skip
KINDS = {"block": ("--draft-vocab", "200", "--block", "3"), "draft": ("--own-embedding",)}


def train(kind, target_folder, answers_folder, out, processes):
    """By the command line, in so many processes, with the environment that launchers give them: what each prints."""
    words = ["-m", "outrider", "train", kind, target_folder, "--answers", str(answers_folder), "--out", str(out)]
    shared = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"WORLD_SIZE": str(processes), "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            [sys.executable, *words, *OPTIONS, *KINDS[kind]],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(processes)
    ]
    told = [each.communicate(timeout=500) for each in started]
    assert [each.returncode for each in started] == [0] * processes, told
    return [out for out, _ in told]


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def weights_of(out):
    with safe_open(out / "checkpoint.safetensors", "pt") as stored:
        return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - no mapping


@pytest.mark.parametrize("kind", ["block", pytest.param("draft", marks=pytest.mark.slow)])
def test_two_processes_are_one_with_twice_the_passes(kind, target_folder, answers_folder, tmp_path):
    (alone,) = train(kind, target_folder, answers_folder, tmp_path / "1", 1)
    first, second = train(kind, target_folder, answers_folder, tmp_path / "2", 2)
    one, two = weights_of(tmp_path / "1"), weights_of(tmp_path / "2")
    assert one.keys() == two.keys()
    for name, each in one.items():
        if each.is_floating_point():
            torch.testing.assert_close(two[name], each, rtol=1e-3, atol=1e-4, msg=name)
    assert "report:" in alone
    assert "report:" in first
    assert not second  # the first process alone tells
    names = {file.name for file in (tmp_path / "2").iterdir()}
    assert names == {file.name for file in (tmp_path / "1").iterdir()}


class Counted:
    """In place of kept rows: remembers what was read."""

    def __init__(self):
        self.loaded = []

    def load(self, chosen):
        self.loaded.append(chosen.tolist())


@pytest.mark.parametrize(("rows", "fitting"), [(24, 24), (26, 8)])
def test_processes_divide_the_rows_of_every_step(rows, fitting):
    config = TrainConfig(length=64, step_tokens=384, pass_tokens=64, epochs=4, reuse=2)
    sizes = Sizes.of(config, rows, fitting, cuda=True, ranks=3)
    assert sizes.passes % 3 == 0

    def taken(feed, kept):
        return [[kept.loaded[-1][slot] for slot in feed.slots(step).tolist()] for step in range(12)]

    kept = [Counted() for _ in range(4)]
    whole = taken(Feed(kept[3], sizes, 5), kept[3])
    parts = [taken(Feed(kept[rank], sizes, 5, Ranks(rank, 3)), kept[rank]) for rank in range(3)]
    for step in range(12):
        by_pass = [parts[i % 3][step][i // 3] for i in range(sizes.passes)]
        assert by_pass == whole[step]
    if fitting >= rows:
        assert sorted(row for each in kept[:3] for row in each.loaded[0]) == sorted(kept[3].loaded[0])
        assert len(kept[0].loaded[0]) == sizes.kept_rows // 3


def test_steps_have_a_pass_for_every_process():
    config = TrainConfig(length=64, step_tokens=512)
    alone = Sizes.of(config, 1000, 1000, cuda=True)
    assert (alone.passes, alone.pass_rows) == (1, 8)
    shared = Sizes.of(config, 1000, 1000, cuda=True, ranks=4)
    assert (shared.passes, shared.pass_rows, shared.step_rows) == (4, 2, 8)


def test_alone_nothing_is_needed(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join_ranks("auto") is ALONE
    assert ALONE.device("auto") == "auto"
    values = [torch.ones(2)]
    ALONE.add_up(values)
    assert values[0].tolist() == [1, 1]
    assert ALONE.agreed(2.5, torch.device("cpu")) == 2.5
    assert replace(ALONE, rank=3, count=4, local=1).device("auto") == "cuda:1"
    assert not Ranks(1, 2).first


def test_without_accelerate_it_is_told(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ConfigError, match=r"outrider\[train\]"):
        join_ranks("cpu")
