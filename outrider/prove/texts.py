"""Compares texts with and without speculation token by token: alone and batched, with cold caches and prefix hits."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from outrider.core.sampling import Token
from outrider.engine.results import Result
from outrider.llm import LLM
from outrider.prove.checks import Check, Status
from outrider.prove.law import law_after
from outrider.prove.plain_passes import PlainPasses
from outrider.prove.settings import TextCase
from outrider.verify.noise import gumbel

TIE_FACTOR = 4.0  # each of two logits may move by up to twice the rounding that was measured
MIN_TOLERANCE = 1e-6  # for the rounding of the scores themselves
LOGPROB_TOLERANCE = 1e-4  # for that of log-probabilities, which contain sums over the vocabulary
VARIANTS = ("alone, cold", "alone, prefix hit", "batched, cold", "batched, prefix hit")
FEW_VARIANTS = ("alone, cold", "batched, prefix hit")
_salts = count()


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between two texts that must be equal."""

    status: Status
    detail: str
    gap: float | None = None
    """The gap between the scores of the two best tokens there, or between two log-probabilities; None: neither."""


class PlainTexts:
    """The texts of cases without speculation, each generated once, alone and with cold caches."""

    def __init__(self) -> None:
        self._known: dict[str, Result] = {}

    def of(self, llm: LLM, case: TextCase) -> Result:
        if case.name not in self._known:
            self._known[case.name] = generate(llm, [case], max_draft=0)[0]
        return self._known[case.name]


def generate(llm: LLM, cases: Seq[TextCase], *, salt: str | None = None, **options: Any) -> list[Result]:
    """Generate the texts of cases together. All must have the first case's `more`. salt None: with cold caches."""
    salt = f"prove {next(_salts)}" if salt is None else salt
    more = dict(cases[0].more)
    if "prediction" in more and not llm.drafter.traits.uses_prediction:
        del more["prediction"]
    prompts, params = [list(case.prompt) for case in cases], [case.params for case in cases]
    return llm.generate(prompts, params, salt=salt, progress=False, **more, **options)


def speculative_variants(llm: LLM, cases: Seq[TextCase], names: Seq[str]) -> dict[str, list[Result]]:
    """The texts of all cases with speculation, in each of the named VARIANTS, which must be given in their order.

    Each cold variant begins with a new salt: cases whose prompts differ then find nothing in the cache.
    """
    salt, found = "", dict[str, list[Result]]()
    for name in names:
        how, cache = name.split(", ")
        if cache == "cold":
            salt = f"prove {next(_salts)}"
        together = [[case] for case in cases] if how == "alone" else [cases]
        found[name] = [result for piece in together for result in generate(llm, piece, salt=salt)]
    return found


class TextChecks:
    """Compares texts, and judges whether a difference is a tie or a bug."""

    def __init__(self, passes: PlainPasses, plain: PlainTexts, rounding: float, eos_ids: frozenset[Token]) -> None:
        self.passes, self.plain, self.rounding, self.eos_ids = passes, plain, rounding, eos_ids

    def run(self, llm: LLM, cases: Seq[TextCase], who: str, names: Seq[str] = VARIANTS) -> Iterator[Check]:
        """A check for each case, in the named variants. who: the mode and the drafter, for the checks' names."""
        plain = [self.plain.of(llm, case) for case in cases]
        variants = speculative_variants(llm, cases, names)
        for i, case in enumerate(cases):
            yield self._check(case, plain[i], {name: results[i] for name, results in variants.items()}, who)

    def _check(self, case: TextCase, plain: Result, variants: dict[str, Result], who: str) -> Check:
        found = {name: self.difference(case, plain, other) for name, other in variants.items()}
        apart = {name: each for name, each in found.items() if each is not None}
        states = {each.status for each in apart.values()}
        status: Status = "fails" if "fails" in states else "tie" if states else "holds"
        tallies = [other.stats.all for other in variants.values()]
        drafted, accepted = sum(t.drafted for t in tallies), sum(t.accepted for t in tallies)
        same = f"{len(plain.tokens)} tokens, {drafted} drafted, {accepted} accepted in {len(variants)} runs"
        return Check(
            group="texts",
            name=f"{who}: {case.name}",
            status=status,
            detail="; ".join(f"{name}: {each.detail}" for name, each in apart.items()) or same,
            figures={
                "tokens": len(plain.tokens),
                "drafted": drafted,
                "accepted": accepted,
                "shared_tokens": max(other.stats.shared_tokens for other in variants.values()),
                "differences": {name: {"detail": each.detail, "gap": each.gap} for name, each in apart.items()},
            },
        )

    def difference(self, case: TextCase, plain: Result, other: Result) -> Difference | None:
        """The first difference; None where text and end are the same and log-probabilities are, but for rounding."""
        pairs = zip(plain.tokens, other.tokens, strict=False)
        shorter = min(len(plain.tokens), len(other.tokens))
        at = next((i for i, (one, two) in enumerate(pairs) if one != two), shorter)
        if at < shorter:
            return self._token_difference(case, plain, other, at)
        one, two = (f"{len(r.tokens)} tokens, {r.finish_reason}, {r.stop_reason!r}" for r in (plain, other))
        if one != two or plain.text != other.text:
            return Difference(
                "fails", f"the same tokens up to {at}, then plain ends with {one}, speculative with {two}"
            )
        gap = max(
            (abs(a.logprob - b.logprob) for a, b in zip(plain.logprobs, other.logprobs, strict=True)), default=0.0
        )
        if gap > self._tolerance(1.0) + LOGPROB_TOLERANCE:
            return Difference("fails", f"a log-probability differs by {gap:.2g}; rounding is {self.rounding:.2g}", gap)
        return None

    def _tolerance(self, temperature: float) -> float:
        return TIE_FACTOR * self.rounding / temperature + MIN_TOLERANCE

    def _token_difference(self, case: TextCase, plain: Result, other: Result, at: int) -> Difference:
        """Judge two tokens that differ: a tie where both scores are within the tolerance of the best one, or a
        truncation is as close to another result; else a bug."""
        params, output = case.params, plain.tokens[:at]
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        (logits,) = self.passes.logits_after([(*case.prompt, *output)])
        law = law_after(logits, params, case.prompt, output, stops)
        scores = law.scores.masked_fill(law.probs <= 0, -torch.inf) if not params.greedy else law.scores
        if not params.greedy:
            scores = scores + gumbel(plain.seed, len(case.prompt) + at, len(scores))
        best = scores.topk(2).values
        gap = float(best[0] - best[1])
        tolerance = self._tolerance(params.temperature or 1.0)
        lag = float(best[0] - min(scores[plain.tokens[at]], scores[other.tokens[at]]))
        tie = lag <= tolerance or law.margin <= tolerance
        detail = (
            f"token {at} is {plain.tokens[at]} plain and {other.tokens[at]} speculative; "
            f"top-2 gap {gap:.2g}, rounding {self.rounding:.2g}: {'tie' if tie else 'bug'}"
        )
        return Difference("tie" if tie else "fails", detail, gap)
