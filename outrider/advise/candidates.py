"""Which drafters could serve a target: those that need nothing, a shipped head, and what the user names."""

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
"""Nodes of the tree that is tried with a head."""
DRAFTERS_OF_HEADS: dict[HeadKind, str] = {
    "eagle": "eagle", "eagle3": "eagle", "block": "block", "medusa": "medusa", "mtp": "mtp",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter to try."""

    drafter: str
    """As `--drafter` takes it."""
    tree: bool = False
    """It drafts trees, whose size is fixed."""


def candidates(target: Path, drafts: Seq[str]) -> Iterator[Candidate]:
    """target: its folder. drafts: draft models and heads, by name or folder. Not all need fit: see `measure`."""
    yield Candidate("suffix")
    yield Candidate("prompt-lookup")
    shipped = shipped_for(target)
    named = [_head(name) for name in drafts]
    if shipped is not None:
        named.insert(0, (shipped.drafter, ""))  # which takes it by itself
    for kind, name in named:
        model = f"model={name}" if name else ""
        yield Candidate(f"{kind}:{model}" if model else kind)
        if kind in ("eagle", "block"):
            yield Candidate(f"{kind}:{model + ',' if model else ''}tree={TREE}", tree=True)
    if not named:
        yield Candidate("layer-skip")


def _head(name: str) -> tuple[str, str]:
    """The drafter that runs what a name stands for: a head by its kind, everything else as a draft model."""
    try:
        return DRAFTERS_OF_HEADS[kind_of(open_head(name))], name
    except (ConfigError, KeyError):
        return "draft-model", name
