"""Compares sampled texts with the target's law: many draws of short texts, for each option and each pair of options."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.core.draft import Draft, Verdict
from outrider.core.draws import Draws
from outrider.core.errors import RequestError
from outrider.core.host_copy import HostCopy
from outrider.core.sampling import SamplingParams, Token
from outrider.core.sequence import Sequence
from outrider.engine.results import Result
from outrider.llm import LLM
from outrider.prove.checks import EVIDENCE, POOLED, Check
from outrider.prove.evalues import (
    DRAFTED_ALTERNATIVES,
    LIKELY_ALTERNATIVES,
    LawTest,
    LearntLaw,
    Simulator,
    drafted_payoffs,
    likely_payoffs,
)
from outrider.prove.law import Law, law_after
from outrider.prove.plain_passes import PlainPasses, Text
from outrider.prove.settings import NO_OPTION
from outrider.verify.base import Verifier
from outrider.verify.probs import Positions

SALT = "prove draws"
TOKENS = 4  # tokens of each draw; the first comes from the prompt's own pass, so that nothing is drafted for it
TESTS = {
    "text": LearntLaw.ALTERNATIVES,
    "likely and rare tokens": LIKELY_ALTERNATIVES,
    "drafted tokens": DRAFTED_ALTERNATIVES,
    "draws of the draft": LIKELY_ALTERNATIVES,
}
"""The tests, with the number of alternatives that each bets on."""
LIKELIEST = "the likeliest token"
TOWARDS = {"drafted tokens": "drafted tokens", "draws of the draft": "the likeliest draft token"}
"""What a simulated bias favours, by test; in tests that are not listed, LIKELIEST."""


class WatchedVerifier:
    """Wraps a verifier and tests whether texts lean towards drafts, and drafts follow the probabilities they state."""

    def __init__(self, verifier: Verifier, tolerance: float) -> None:
        self._verifier, self._tolerance, self._simulator = verifier, tolerance, Simulator(1)
        self.towards, self.drawn = LawTest(TESTS["drafted tokens"]), LawTest(TESTS["draws of the draft"])

    def decide(
        self, seqs: Seq[Sequence], drafts: Seq[Draft], logits: Tensor, positions: Positions | None = None
    ) -> HostCopy | None:
        return self._verifier.decide(seqs, drafts, logits, positions)

    def draws(self, seqs: Seq[Sequence]) -> Draws | None:
        return self._verifier.draws(seqs)

    def judge(
        self, seqs: Seq[Sequence], drafts: Seq[Draft], logits: Tensor, decided: HostCopy | None = None
    ) -> list[Verdict | RequestError]:
        verdicts = self._verifier.judge(seqs, drafts, logits, decided)
        row = 0
        for seq, draft, verdict in zip(seqs, drafts, verdicts, strict=True):
            if len(draft) and isinstance(verdict, Verdict) and seq.salt == SALT:
                self._note(seq, draft, logits[row], verdict.tokens[0])
            row += 1 + len(draft)
        return verdicts

    def _note(self, seq: Sequence, draft: Draft, logits: Tensor, token: Token) -> None:
        """Bet on one sequence of a round. token: the round's first. The draft is known before it: the bet is fair."""
        output = seq.tokens[seq.prompt_len :]
        law = law_after(logits, seq.params, seq.tokens[: seq.prompt_len], output, seq.stop_ids)
        if law.margin > self._tolerance:
            stated = _first_stated(draft, len(law.probs))
            possible = stated * (law.probs > 0)
            lure = possible / possible.sum() if float(possible.sum()) > 0 else law.probs
            drawn = self._simulator.draw(token, law.probs, lure)
            self.towards.add(drafted_payoffs(law.probs, stated, drawn.tokens), drawn.distance)
        if draft.probs is None:
            return
        parents = [draft.parent(node) for node in range(len(draft))]
        for node, parent in enumerate(parents):
            if parent not in parents[:node]:  # only the first of siblings is drawn from the stated law as it is
                stated = draft.probs[node].double().cpu()
                drawn = self._simulator.draw(draft.tokens[node], stated)
                self.drawn.add(likely_payoffs(stated, drawn.tokens), drawn.distance)


@dataclass(frozen=True, slots=True)
class DrawPlan:
    """One row of options, and the number of texts to draw with it."""

    name: str
    prompt: Text
    params: SamplingParams
    """The options. The seeds of the draws count up from the seed here."""
    draws: int


def draw_row(llm: LLM, plan: DrawPlan, passes: PlainPasses, tolerance: float, limit: float) -> Check:
    """Draw texts with one row of options and compare their law with the target's. tolerance: a law's least margin."""
    engine = llm.engine
    inner, watched = engine.verifier, WatchedVerifier(engine.verifier, tolerance)
    first = plan.params.seed or 0
    params = [replace(plan.params, seed=first + i) for i in range(plan.draws)]
    if llm.mode == "distribution":
        engine.verifier = watched
    try:
        results = llm.generate([list(plan.prompt)] * plan.draws, params, salt=SALT, progress=False)
    finally:
        engine.verifier = inner
    text, likely = compare_texts(plan, results, passes, tolerance, llm.tokenizer.eos_ids)
    found = {
        "text": text,
        "likely and rare tokens": likely,
        "drafted tokens": watched.towards,
        "draws of the draft": watched.drawn,
    }
    tallies = [result.stats.all for result in results]
    return row_check(
        f"{llm.mode}: {plan.name}",
        found,
        limit,
        draws=plan.draws,
        options=options_of(plan.name),
        drafted=sum(t.drafted for t in tallies),
        accepted=sum(t.accepted for t in tallies),
    )


def row_check(name: str, found: dict[str, LawTest], limit: float, **figures: Any) -> Check:
    """The check of one row of options. It keeps the results of its tests for `pool_rows`. figures: further figures of
    the check; `draws` and `options` are required."""
    both = found["text"].beside(found["likely and rare tokens"])
    kept = {EVIDENCE: {test: each.as_dict() for test, each in found.items()}}
    check = _test_check(name, "text", both, limit)
    return replace(check, detail=f"{figures['draws']} draws, {check.detail}", figures=check.figures | figures | kept)


def compare_texts(
    plan: DrawPlan, results: Seq[Result], passes: PlainPasses, tolerance: float, eos_ids: frozenset[Token]
) -> tuple[LawTest, LawTest]:
    """(text, likely and rare tokens): bets on every token after a beginning of a text that came at least twice.

    Which beginnings those are depends on the tokens before the one that is bet on alone, so the bets are fair.
    """
    stops = frozenset(plan.params.stop_token_ids) | (frozenset() if plan.params.ignore_eos else eos_ids)
    outputs = [result.tokens for result in results]
    seen = Counter(output[:i] for output in outputs for i in range(len(output)))
    known = sorted((text for text, times in seen.items() if times > 1), key=len)
    laws: dict[Text, Law] = {}
    for output, logits in zip(known, passes.logits_after([(*plan.prompt, *text) for text in known]), strict=True):
        law = law_after(logits, plan.params, plan.prompt, output, stops)
        if law.margin > tolerance:
            laws[output] = law
    bets = LawBets()
    for output in outputs:
        for i, token in enumerate(output):
            if (law := laws.get(output[:i])) is not None:
                bets.add(output[:i], law.probs, token)
    return bets.text, bets.likely


class LawBets:
    """Two tests of tokens against their laws: by laws learnt from the draws, and by likely and rare tokens."""

    def __init__(self) -> None:
        self.text, self.likely = LawTest(TESTS["text"]), LawTest(TESTS["likely and rare tokens"])
        self._learnt, self._simulator = LearntLaw(), Simulator(0)

    def add(self, context: Hashable, law: Tensor, token: int) -> None:
        """Bet on the token after a context. law [vocab]: the law after that context."""
        drawn = self._simulator.draw(token, law)
        self.text.add(self._learnt.payoffs(context, law, drawn.tokens), drawn.distance)
        self.likely.add(likely_payoffs(law, drawn.tokens), drawn.distance)


def pool_rows(mode: str, rows: Seq[Check], limit: float) -> list[Check]:
    """Checks over all rows of options together, where small biases add up, and over all rows with each option."""
    together: list[Check] = []
    for test in TESTS:
        pooled = _pooled(test, rows)
        if pooled.draws or test not in TOWARDS:  # no draft may state probabilities; seeded drafts may know the noise
            check = _test_check(f"{mode}: all rows together, {test}", test, pooled, limit)
            favoured = TOWARDS.get(test, LIKELIEST)
            together.append(replace(check, figures=check.figures | {POOLED: mode, "towards": favoured}))
    checks = without_blind(together)
    for option in dict.fromkeys(each for row in rows for each in row.figures["options"]):
        own = [row for row in rows if option in row.figures["options"]]
        both = _pooled("text", own).beside(_pooled("likely and rare tokens", own))
        checks.append(_test_check(f"{mode}: all {len(own)} rows with {option}", "text", both, limit))
    return checks


def without_blind(tests: Seq[Check]) -> list[Check]:
    """The same checks, with status "not checked" where no test for the same fault would show a fault of any size."""
    seen = {test.figures["towards"] for test in tests if test.figures["visible_bias"] is not None}
    return [
        replace(test, status="not checked", detail=f"{test.detail}; raise --draws")
        if test.status == "holds" and test.figures["towards"] not in seen
        else test
        for test in tests
    ]


def pooled_tests(rows: Mapping[str, Any]) -> int:
    """The max number of checks that `pool_rows` makes of these rows."""
    return len(TESTS) + len({option for name in rows for option in options_of(name)})


def options_of(row: str) -> list[str]:
    """The options of a row, by its name."""
    return [] if row == NO_OPTION else row.split(" + ")


def _pooled(test: str, rows: Seq[Check]) -> LawTest:
    pooled = LawTest(TESTS[test])
    for row in rows:
        if test in row.figures[EVIDENCE]:
            pooled.join(LawTest.from_dict(row.figures[EVIDENCE][test]))
    return pooled


def _test_check(name: str, test: str, found: LawTest, limit: float) -> Check:
    return Check(
        group="sampled",
        name=name,
        status="holds" if found.log_e < limit else "fails",
        detail=describe(test, found, limit),
        figures={
            "log_e": found.log_e,
            "limit": limit,
            "visible_bias": found.visible_bias(limit),
            "compared": found.draws,
        },
    )


def describe(test: str, found: LawTest, limit: float) -> str:
    """The result of a test, and the bias that it would show, in words."""
    bias, favoured = found.visible_bias(limit), TOWARDS.get(test, LIKELIEST)
    shown = "too few to show a bias" if bias is None else f"a bias of {bias:.3f} towards {favoured} would show"
    return f"{found.draws} tokens compared; log evidence {found.log_e:.1f}, fails at {limit:.1f}; {shown}"


def _first_stated(draft: Draft, vocab: int) -> Tensor:
    """The probabilities [vocab] that the first draft token was drawn from; all on that token where none are stated."""
    stated = torch.zeros(vocab, dtype=torch.float64)
    if draft.probs is None:
        stated[draft.tokens[0]] = 1.0
    else:
        row = draft.probs[0].double().cpu()[:vocab]
        stated[: len(row)] = row
    return stated
