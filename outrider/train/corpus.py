"""A target's answers on disk: shards of token ids, and an index that says what they are answers to."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from outrider.core.errors import ConfigError
from outrider.train.files import write_bytes, write_json

INDEX = "index.json"
FORMAT = 1
SHARD_ANSWERS = 1024
SHARD_SECONDS = 30.0
HELD_OUT_EVERY = 40  # one in so many prompts is held out


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusIndex:
    """What a corpus holds: the answers of which target to which prompts, and how they were sampled."""

    target: str
    vocab_size: int
    prompts: str
    """The digest of the prompts."""
    count: int
    """How many prompts there are."""
    max_tokens: int
    seed: int
    kinds: tuple[str, ...]
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: the tokens of its prompt and its own."""

    prompt: int
    """Which prompt of the collection."""
    kind: int
    """Index in CorpusIndex.kinds."""
    sampled: bool
    """Drawn at temperature 1, not greedy."""
    tokens: Seq[int]
    prompt_len: int


class CorpusWriter:
    """Writes answers to a folder, a shard at a time. If the process is killed, those since the last shard are lost."""

    def __init__(self, folder: Path, name: str) -> None:
        """name: of this writer's shards, different for each process that writes at once."""
        self.folder, self.name = folder, name
        self._held: list[Answer] = []
        self._next = 1 + max((_number(file) for file in folder.glob(f"shard-{name}-*.safetensors")), default=-1)
        self._written = time.monotonic()

    def add(self, answer: Answer) -> None:
        self._held.append(answer)
        due = time.monotonic() - self._written > SHARD_SECONDS
        if len(self._held) >= SHARD_ANSWERS or due:
            self.flush()

    def flush(self) -> None:
        """Write what is held. DiskError where the disk is full; earlier shards stay as they are."""
        if not self._held:
            return
        held = self._held
        arrays = {
            "tokens": np.concatenate([np.asarray(each.tokens, np.int32) for each in held]),
            "lengths": np.array([len(each.tokens) for each in held], np.int32),
            "prompt_lens": np.array([each.prompt_len for each in held], np.int32),
            "prompts": np.array([each.prompt for each in held], np.int32),
            "kinds": np.array([each.kind for each in held], np.int32),
            "sampled": np.array([each.sampled for each in held], np.int32),
        }
        write_bytes(self.folder / f"shard-{self.name}-{self._next:05d}.safetensors", save(arrays))
        self._next, self._held, self._written = self._next + 1, [], time.monotonic()


def open_index(folder: Path, index: CorpusIndex) -> None:
    """Begin a corpus in `folder`, or continue one of the same kind. ConfigError where another one lies there."""
    if not (folder / INDEX).exists():
        write_json(folder / INDEX, asdict(index))
        return
    found = read_index(folder)
    differing = [name for name, value in asdict(index).items() if asdict(found)[name] != value]
    if differing:
        raise ConfigError(
            f"{folder} holds a collection with other {', '.join(differing)}; name another folder, or delete it"
        )


def read_index(folder: Path) -> CorpusIndex:
    """The index in a folder. ConfigError where the folder holds no collection."""
    file = folder / INDEX
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        index = CorpusIndex(**{**fields, "kinds": tuple(fields["kinds"])})
    except OSError as error:
        raise ConfigError(
            f"{folder} holds no answers ({error.strerror or error}); make some with `outrider train collect`"
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{file} is not an index of answers ({error}); collect them again") from error
    if index.format != FORMAT:
        raise ConfigError(f"{file} has format {index.format}, this version reads {FORMAT}; collect the answers again")
    return index


@dataclass(frozen=True, slots=True)
class Corpus:
    """All answers of a collection, in the order of their prompts."""

    index: CorpusIndex
    tokens: NDArray[np.int32]
    """The tokens of all answers, concatenated, each answer behind its prompt."""
    starts: NDArray[np.int64]
    """[answers + 1]: where each begins."""
    prompt_lens: NDArray[np.int32]
    prompts: NDArray[np.int32]
    kinds: NDArray[np.int32]
    sampled: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.prompts)

    def text(self, i: int) -> NDArray[np.int32]:
        """The tokens of answer i, with its prompt."""
        return self.tokens[self.starts[i] : self.starts[i + 1]]

    def split(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Answers to train with, and answers to held-out prompts.

        Which these are depends on a prompt's number alone, except in a corpus of a handful. Prompts are held out in
        pairs of neighbours, one greedy and one sampled.
        """
        held = (self.prompts // 2) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        if not held.any() and len(self) > 1:  # a handful of prompts: the last two at most
            held = np.arange(len(self)) >= len(self) - max(1, min(2, len(self) - 2))
        return np.flatnonzero(~held), np.flatnonzero(held)


def done_prompts(folder: Path) -> set[int]:
    """The prompts that have an answer on disk."""
    return {int(i) for shard in _shards(folder) for i in shard["prompts"]}


def load_corpus(folder: Path) -> Corpus:
    """Every answer in a folder. ConfigError where there is none."""
    index, shards = read_index(folder), _shards(folder)
    if not shards:
        raise ConfigError(f"{folder} holds no answers yet; run `outrider train collect` to its end")
    whole = {name: np.concatenate([shard[name] for shard in shards]) for name in shards[0]}
    order = np.argsort(whole["prompts"], kind="stable")
    starts = np.concatenate([[0], np.cumsum(whole["lengths"], dtype=np.int64)])
    pieces = [whole["tokens"][starts[i] : starts[i + 1]] for i in order]
    lengths = whole["lengths"][order]
    return Corpus(
        index,
        np.concatenate(pieces),
        np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        whole["prompt_lens"][order],
        whole["prompts"][order],
        whole["kinds"][order],
        whole["sampled"][order].astype(np.bool_),
    )


def _shards(folder: Path) -> list[dict[str, NDArray[np.int32]]]:
    found: list[dict[str, NDArray[np.int32]]] = []
    for file in sorted(folder.glob("shard-*.safetensors")):
        try:
            found.append(load_file(file))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file} cannot be read ({error}); delete it, and collect again what it held") from error
    return found


def _number(file: Path) -> int:
    return int(file.stem.rsplit("-", 1)[1])
