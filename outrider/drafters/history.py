"""A history to draft from: answers in a file made in advance, the same for every request."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from outrider.core.errors import ConfigError
from outrider.core.sampling import Token

MAX_TOKENS = 1 << 24
"""Max tokens of one file."""


class AnswerHistory(NamedTuple):
    """Answers, concatenated."""

    tokens: NDArray[np.int32]  # [N]
    sizes: NDArray[np.int32]  # [A]: tokens of each answer
    vocab_size: int

    def answers(self) -> list[list[Token]]:
        ends = np.cumsum(self.sizes)
        return [self.tokens[end - size : end].tolist() for end, size in zip(ends, self.sizes, strict=True)]


def history_bytes(answers: Seq[Seq[Token]], vocab_size: int) -> bytes:
    """The contents of a file for `read_history`."""
    from safetensors.numpy import save

    tokens = np.fromiter((token for answer in answers for token in answer), np.int32)
    sizes = np.array([len(answer) for answer in answers], np.int32)
    return save({"tokens": tokens, "sizes": sizes}, metadata={"kind": "history", "vocab_size": str(vocab_size)})


def read_history(file: str, vocab_size: int) -> AnswerHistory:
    """Read a history for a target of this vocabulary size. ConfigError where the file holds no such history."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"history: there is no file {path}; `outrider train ngram` makes one")
    try:
        with safe_open(path, "np") as stored:
            told = stored.metadata() or {}
            sizes = {name: stored.get_slice(name).get_shape() for name in stored.keys()}  # noqa: SIM118
            if told.get("kind") != "history" or sizes.keys() != {"tokens", "sizes"}:
                raise ConfigError(f"history: {path} holds no history; `outrider train ngram` makes one")
            if any(len(shape) != 1 or shape[0] > MAX_TOKENS for shape in sizes.values()):
                raise ConfigError(f"history: {path} has more than {MAX_TOKENS} tokens, or not a row of them")
            found = AnswerHistory(stored.get_tensor("tokens"), stored.get_tensor("sizes"), int(told["vocab_size"]))
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ConfigError(f"history: {path} cannot be read ({error}); make it again") from error
    if found.vocab_size != vocab_size:
        raise ConfigError(
            f"history: {path} was made for a target of {found.vocab_size} tokens and this one has {vocab_size}; make "
            "one for this target with `outrider train ngram`"
        )
    tokens, sizes = found.tokens, found.sizes
    sound = tokens.dtype == sizes.dtype == np.int32 and (sizes > 0).all() and sizes.sum(dtype=np.int64) == len(tokens)
    if not sound or (len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab_size)):
        raise ConfigError(f"history: {path} is damaged; make it again")
    return found
