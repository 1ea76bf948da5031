"""The drafters to try for a target: those that need no model, a shipped head, and the models and heads a user names."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from outrider.core.errors import ConfigError
from outrider.drafters.shipped import shipped_for
from outrider.models.heads.checkpoint import kind_of
from outrider.models.heads.config import HeadKind
from outrider.models.heads.files import open_head

TREE = 24
"""Nodes of the trees that a head is tried with."""
DRAFTERS_OF_HEADS: dict[HeadKind, str] = {
    "eagle": "eagle", "eagle3": "eagle", "block": "block", "medusa": "medusa", "mtp": "mtp",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter to try."""

    drafter: str
    """As `--drafter` takes it."""
    tree: bool = False
    """Whether it drafts trees, whose size is fixed."""


def candidates(target: Path, drafts: Seq[str]) -> Iterator[Candidate]:
    """The candidates for a target, which need not fit it: loading one that does not fit raises ConfigError.

    target: its folder. drafts: draft models and heads, by name or folder.
    """
    yield Candidate("suffix")
    yield Candidate("prompt-lookup")
    shipped = shipped_for(target)
    named = [_head(name) for name in drafts]
    if shipped is not None:
        named.insert(0, (shipped.drafter, ""))  # without a model named, this drafter loads the shipped head
    for kind, name in named:
        model = f"model={name}" if name else ""
        yield Candidate(f"{kind}:{model}" if model else kind)
        if kind in ("eagle", "block"):
            yield Candidate(f"{kind}:{model + ',' if model else ''}tree={TREE}", tree=True)
    if not named:
        yield Candidate("layer-skip")


def _head(name: str) -> tuple[str, str]:
    """(drafter, name): the drafter of the head's kind where the name is that of a head, else `draft-model`."""
    try:
        return DRAFTERS_OF_HEADS[kind_of(open_head(name))], name
    except (ConfigError, KeyError):
        return "draft-model", name
