"""A drafter as a controller knows it. Data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Member:
    """A drafter as the controller knows it."""

    name: str
    max_tokens: int
    runs_model: bool = False
    pays_budget: bool = False
    """A round costs what the budget says, however few tokens are drafted: the host does not see them first.

    Else it is asked for all there is room for, at next to no cost, and what it drafts is scored where that pays.
    """
    lengths: tuple[int, ...] = ()
    """As in `Outlook`."""
    limits_itself: bool = False
    """How far it drafts is its own choice for each text, and the pass no wider than that."""
    shares: bool = False
    """Its drafts share the rows of a pass, where they are the surest: lengths are what each has on average."""
    includes: frozenset[int] = frozenset()
    """Other members that take part in what it drafts."""
