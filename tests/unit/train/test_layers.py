"""The search for layers to leave out: what it measures, and that it finds layers that do nothing."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.cli.main import main
from outrider.core.errors import ConfigError
from outrider.models.decoder import Decoder
from outrider.testing.synthetic import synthetic_pair
from outrider.train.layers import LayerChoice, LayerSearch, best_length
from outrider.train.packing import PADDING, PackedRows

IDLE = (1, 3)  # layers that add next to nothing


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    made = synthetic_pair("tiny", 2, agreement=0.5, seed=3).target
    for layer in IDLE:
        for part in (made.weights.layers[layer].out, made.weights.layers[layer].down):
            part.weight.mul_(1e-9)  # pyright: ignore[reportAttributeAccessIssue]
    return made


@pytest.fixture(scope="module")
def rows() -> PackedRows:
    """A row of two texts and padding, and a row of one."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(512, (2, 40), generator=generator)
    texts = torch.zeros(2, 40, dtype=torch.int64)
    texts[0, 15:], texts[0, 33:] = 1, PADDING
    positions = torch.arange(40).repeat(2, 1)
    positions[0, 15:] -= 15
    in_answer = (positions >= 4) & (texts != PADDING)
    return PackedRows(tokens, texts, positions, in_answer, texts.clone())


def run_cli(*words: str) -> Any:
    """The command line; its exit code."""
    with pytest.raises(SystemExit) as left:
        main([*words, "--device", "cpu"])
    return left.value.code


def plain_choices(decoder: Decoder, ids: list[int], kept: list[int]) -> list[int]:
    """By every place of one text: what the kept layers choose over the whole model's keys and values before it."""
    config, weights, count = decoder.config, decoder.weights, len(ids)
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, at: int | None = None) -> Tensor:
        if at is None:
            seen[layer] = k.double(), v.double()
        else:  # one row: the whole model's before, its own last
            keys, values = seen[layer]
            k, v = torch.cat([keys[:at], k.double()]), torch.cat([values[:at], v.double()])
        out = torch.zeros(q.shape, dtype=torch.float64)
        for row, head in itertools.product(range(len(q)), range(config.heads)):
            own = head * config.kv_heads // config.heads
            size = row + 1 if at is None else at + 1
            scores = (k[:size, own].double() @ q[row, head].double()) * config.attention_scale
            out[row, head] = scores.softmax(0) @ v[:size, own].double()
        return out.flatten(1).to(decoder.dtype)

    decoder.forward(torch.tensor(ids), torch.arange(count), attend)
    small = Decoder(
        replace(config, layers=config.layers[: len(kept)]),
        replace(weights, layers=[weights.layers[i] for i in kept]),
        decoder.dtype,
    )
    chosen: list[int] = []
    for at in range(count):
        hidden = small.forward(
            torch.tensor(ids[at : at + 1]),
            torch.tensor([at]),
            lambda layer, q, k, v, at=at: attend(kept[layer], q, k, v, at),
        )
        chosen.append(int(decoder.logits(hidden).argmax()))
    return chosen


@torch.no_grad()
def test_agreement_is_that_of_a_first_draft_step_at_every_place(decoder: Decoder, rows: PackedRows):
    same = count = 0
    for row, begin, end in ((0, 0, 15), (0, 15, 33), (1, 0, 40)):
        ids = rows.tokens[row, begin:end].tolist()
        whole = plain_choices(decoder, ids, [0, 1, 2, 3])
        part = plain_choices(decoder, ids, [0, 2, 3])
        answers = range(3, len(ids) - 1)  # places whose next token is the answer's
        same += sum(whole[i] == part[i] for i in answers)
        count += len(answers)
    found = LayerSearch(decoder, rows).judge((1,))
    assert found.agreement == pytest.approx(same / count)


def test_layers_that_do_nothing_are_left_out(decoder: Decoder, rows: PackedRows):
    steps: list[LayerChoice] = []
    best = LayerSearch(decoder, rows).search(steps.append)
    assert steps[1].skip == IDLE
    assert steps[1].agreement == 1.0
    assert set(IDLE) <= set(best.skip)
    assert best.speedup == max(step.speedup for step in steps)


@pytest.mark.parametrize(("acceptance", "cost"), [(0.9, 0.4), (0.5, 0.5), (0.2, 0.9), (1.0, 0.1)])
def test_the_best_length_is_the_best_of_all(acceptance: float, cost: float):
    k, speedup = best_length(acceptance, cost)
    by_length = {n: sum(acceptance**i for i in range(n + 1)) / (1 + n * cost) for n in range(1, 9)}
    assert speedup == max(by_length.values()) == by_length[k]


def test_rows_without_answers_are_refused(decoder: Decoder, rows: PackedRows):
    empty = PackedRows(rows.tokens, rows.texts, rows.positions, torch.zeros_like(rows.in_answer), rows.answers)
    with pytest.raises(ConfigError, match="no answers"):
        LayerSearch(decoder, empty)


def test_the_command_tells_which_layers_to_leave_out(target_folder: str, answers_folder: Path, capsys):
    small = ("--tokens", "300", "--length", "64")
    assert not run_cli("train", "layers", target_folder, "--answers", str(answers_folder), *small)
    told = capsys.readouterr()
    assert "without" in told.err
    assert "expected: " in told.out + told.err


def test_bad_sizes_and_missing_answers_are_refused(target_folder: str, answers_folder: Path, tmp_path: Path, capsys):
    for options in (("--tokens", "1"), ("--length", "2"), ("--answers", str(tmp_path / "none"))):
        code = run_cli("train", "layers", target_folder, "--answers", str(answers_folder), *options)
        assert code == 2, options
