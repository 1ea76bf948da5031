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
    """A pass has a row for each token of the budget, however few are drafted: the host does not see the draft first.

    Else, unless it runs a model, it is asked for all there is room for, and its draft is scored where that pays.
    """
    lengths: tuple[int, ...] = ()
    """As in `Outlook`."""
    limits_itself: bool = False
    """It decides itself how far it drafts for each text, and the pass is no wider than that."""
    shares: bool = False
    """Its drafts share the rows of a pass, which go to the tokens it is surest of: lengths are averages."""
    includes: frozenset[int] = frozenset()
    """Other members that take part in what it drafts."""
