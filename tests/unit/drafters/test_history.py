"""A history in a file: read as it was written, refused where it does not fit, drafted from for every salt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from outrider.core.errors import ConfigError
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import DrafterContext, RoundView
from outrider.drafters.history import history_bytes, read_history
from outrider.drafters.registry import parse_drafter
from outrider.kernels.lookup import PUBLIC
from outrider.runners.text_store import AnswerRing

TOLD = {"kind": "history", "vocab_size": "16"}
ANSWERS = [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7, 6]]


def write(folder: Path, content: bytes) -> str:
    file = folder / "history.safetensors"
    file.write_bytes(content)
    return str(file)


def sequence(number: int, tokens: list[int], salt: str) -> Sequence:
    params = SamplingParams()
    return Sequence(id=number, tokens=tokens, prompt_len=len(tokens), params=params, seed=0, salt=salt)


def test_it_is_read_as_it_was_written(tmp_path: Path):
    found = read_history(write(tmp_path, history_bytes(ANSWERS, 16)), 16)
    assert found.answers() == ANSWERS
    assert found.vocab_size == 16


@pytest.mark.parametrize("salt", ["", "x"])
def test_texts_of_every_salt_draft_from_it(tmp_path: Path, salt: str):
    file = write(tmp_path, history_bytes(ANSWERS, 16))
    drafter: Any = parse_drafter(f"suffix:min_prob=0,history={file}").build(DrafterContext(vocab_size=16, context=64))
    (draft,) = drafter.propose(RoundView([sequence(1, [11, 2, 3, 4], salt)], [3]))
    assert list(draft.tokens) == [5, 6, 7]
    (nothing,) = drafter.propose(RoundView([sequence(2, [11, 12, 13], salt)], [3]))
    assert not len(nothing)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (history_bytes(ANSWERS, 17), "17 tokens and this one has 16"),
        (history_bytes([[1, 99]], 16), "damaged"),
        (save({"tokens": np.zeros(3, np.int32), "sizes": np.array([2], np.int32)}, TOLD), "damaged"),
        (save({"tokens": np.zeros(3, np.int32)}, TOLD), "holds no history"),
        (save({"x": np.zeros(3, np.int32)}), "holds no history"),
        (b"nothing", "cannot be read"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tmp_path: Path, content: bytes, reason: str):
    with pytest.raises(ConfigError, match=reason):
        read_history(write(tmp_path, content), 16)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="no file"):
        parse_drafter(f"suffix:history={tmp_path / 'none'}").build(DrafterContext(vocab_size=16, context=64))


def test_in_the_ring_of_a_device_it_belongs_to_everybody():
    ring = AnswerRing(20, 5, torch.device("cpu"))
    for answer in ANSWERS:
        ring.add(None, answer)
    ring.add("x", [3])
    owners = ring.history.owners[: ring.history.used].tolist()
    assert owners == [PUBLIC] * 13 + [0, 0]
    assert ring.owner("x") == 0
    assert ring.owner("y") == -1
