"""How far drafts would be accepted on held-out answers, by position and kind, without running the engine."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.train.corpus import Corpus

GREEDY, SAMPLED = 0, 1


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of chains of K draft tokens: the chance that each is accepted, given that those before it were."""

    greedy: tuple[float, ...]
    """On greedy answers: the draft's best token is the target's."""
    sampled: tuple[float, ...]
    """On answers drawn at temperature 1: the overlap of the two distributions."""

    @property
    def tau(self) -> float:
        """Expected tokens per pass of the target, greedy."""
        return expected_tau(self.greedy)

    @property
    def tau_sampled(self) -> float:
        return expected_tau(self.sampled)

    def as_json(self) -> dict[str, Any]:
        return {"greedy": self.greedy, "sampled": self.sampled, "tau": self.tau, "tau_sampled": self.tau_sampled}


def expected_tau(chances: tuple[float, ...]) -> float:
    """τ: 1 for the target's own token, plus for each position the chance that all tokens up to it are accepted."""
    total, survival = 1.0, 1.0
    for chance in chances:
        survival *= chance
        total += survival
    return total


class AnswerLabels:
    """The kind of each answer of a corpus, and whether it was sampled: int64 [answers] both, on the device."""

    def __init__(self, corpus: Corpus, device: torch.device) -> None:
        self.kinds = torch.from_numpy(corpus.kinds.astype(np.int64)).to(device)
        self.sampled = torch.from_numpy(corpus.sampled.astype(np.int64)).to(device)


class Tally:
    """Sums over judged chains. A chain that the end of its answer cuts counts as far as it goes."""

    def __init__(self, positions: int, kinds: int, device: torch.device) -> None:
        shape = (2, kinds, positions)
        self.reached = torch.zeros(shape, dtype=torch.float64, device=device)
        """[greedy or sampled, kind, position]: chains that come so far; of sampled ones, the sum of the chances."""
        self.accepted = torch.zeros_like(self.reached)

    def add(self, how: Tensor, kinds: Tensor, accepted: Tensor, valid: Tensor) -> None:
        """how, kinds: int64 [N], GREEDY or SAMPLED and which kind; accepted: float [N, K], the chance of each
        position by itself; valid: bool [N, K], whether the answer goes so far."""
        survival = accepted.double().cumprod(1)
        before = torch.cat([torch.ones_like(survival[:, :1]), survival[:, :-1]], 1)
        at = how * self.reached.shape[1] + kinds
        self.reached.flatten(0, 1).index_add_(0, at, before * valid)
        self.accepted.flatten(0, 1).index_add_(0, at, survival * valid)

    def overall(self) -> Acceptance:
        return _acceptance(self.reached.sum(1), self.accepted.sum(1))

    def by_kind(self) -> list[Acceptance | None]:
        """For each kind: None without any chain, empty chances where it has no greedy or no sampled ones."""
        found: list[Acceptance | None] = []
        for k in range(self.reached.shape[1]):
            greedy, sampled = (self.reached[:, k, 0] > 0).tolist()
            each = _acceptance(self.reached[:, k], self.accepted[:, k])
            each = Acceptance(each.greedy if greedy else (), each.sampled if sampled else ())
            found.append(each if greedy or sampled else None)
        return found


def _acceptance(reached: Tensor, accepted: Tensor) -> Acceptance:
    chances = torch.where(reached > 0, accepted / reached.clamp(min=1e-12), 0.0)
    return Acceptance(tuple(chances[GREEDY].tolist()), tuple(chances[SAMPLED].tolist()))


def distinct_bigrams(tokens: list[int]) -> float:
    """The share of a text's bigrams that are distinct: small for a text that repeats itself, on which any drafter
    does well."""
    pairs = list(itertools.pairwise(tokens))
    return len(set(pairs)) / len(pairs) if pairs else 1.0
