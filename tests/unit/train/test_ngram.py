"""Which answers a history keeps, and the command that makes one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.cli.main import main
from outrider.core.errors import ConfigError
from outrider.drafters.history import read_history
from outrider.train.corpus import load_corpus
from outrider.train.ngram import choose_answers

LONELY, COMMON = [[9, 8, 7, 6, 5, 4]], [[1, 2, 3, 4, 5], [0, 1, 2, 3, 4]]


def corpus_of(answers: list[list[int]]) -> Any:
    """Answers to prompts of one token."""
    texts = [np.array([99, *answer], np.int32) for answer in answers]
    return SimpleNamespace(
        split=lambda: (np.arange(len(texts)), np.arange(0)), text=lambda i: texts[i], prompt_lens=[1] * len(texts)
    )


def test_answers_that_share_runs_with_others_are_kept_first():
    assert choose_answers(corpus_of([*LONELY, *COMMON]), 10) == COMMON[::-1]
    assert choose_answers(corpus_of([*LONELY, *COMMON]), 100) == [*LONELY, *COMMON[::-1]]
    with pytest.raises(ConfigError, match="no answer has at most 2 tokens"):
        choose_answers(corpus_of(LONELY), 2)


def test_the_command_writes_what_suffix_reads(answers_folder: Path, tmp_path: Path):
    file = tmp_path / "history.safetensors"
    with pytest.raises(SystemExit) as left:
        main(["train", "ngram", "--answers", str(answers_folder), "--out", str(file), "--tokens", "500"])
    assert not left.value.code
    corpus = load_corpus(answers_folder)
    found = read_history(str(file), corpus.index.vocab_size)
    texts = {tuple(corpus.text(i)[corpus.prompt_lens[i] :].tolist()) for i in range(len(corpus))}
    assert 0 < len(found.tokens) <= 500
    assert {tuple(answer) for answer in found.answers()} <= texts
