"""A draft model that drafts in some rounds and not in others: chains begin behind the round in flight."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from async_toy import ASYNC_TOY, AsyncToyRunner, target
from plain_decoding import assert_same, request, run
from test_controlled_rounds import controlled, members_of
from testbed import CONTEXT, VOCAB

from outrider.control.controller import Controller
from outrider.control.costs import PassTable, RoundCosts, RoundKind
from outrider.control.plan import Plan
from outrider.core.draft import Verdict
from outrider.core.sampling import SamplingParams, Token
from outrider.core.sequence import Sequence, Span
from outrider.drafters.base import DrafterContext, RoundView
from outrider.drafters.draft_model import DraftModel, DraftModelConfig
from outrider.engine.request import EngineLimits
from outrider.runners.base import ChainStart, Scores
from outrider.runners.device_state import DeviceState

K = 4


class Counting(AsyncToyRunner):
    """Counts the tokens of text that the host has it read, and the chains it drafts."""

    read = chains = 0

    def score(self, spans: Seq[Span], after: DeviceState | None = None) -> Scores:
        self.read += sum(len(span.tokens) for span in spans)
        return super().score(spans, after)

    def draft_chains(self, starts: Seq[ChainStart], steps: int, after: DeviceState | None = None) -> list[list[Token]]:
        self.chains += len(starts)
        read = self.read
        made = super().draft_chains(starts, steps, after)
        self.read = read
        return made


def model(order: int = 2) -> Counting:
    return Counting(VOCAB, context=CONTEXT, order=order)


def drafter(runner: AsyncToyRunner, max_round_tokens: int = 512) -> DraftModel:
    context = DrafterContext(vocab_size=VOCAB, context=CONTEXT, max_round_tokens=max_round_tokens)
    return DraftModel(runner, context, DraftModelConfig(model="-", k=K))


def text(number: int, length: int, **params: Any) -> Sequence:
    tokens = [(5 * i + number) % VOCAB for i in range(length)]
    return Sequence(number, tokens, length, SamplingParams(**params), seed=number)


def in_flight(seqs: Seq[Sequence], tokens: Seq[Token], drafted: tuple[int, ...] | None) -> DeviceState:
    """After a round that gives each text one token."""
    lengths, last = torch.tensor([len(s.tokens) + 1 for s in seqs]), [[s.tokens[-1]] for s in seqs]
    new = torch.tensor(tokens)[:, None]
    return DeviceState(lengths, torch.cat([torch.tensor(last), new], 1), torch.tensor(last), lengths * 0, None, drafted)


def commit(seqs: Seq[Sequence], tokens: Seq[Token]) -> None:
    for seq, token in zip(seqs, tokens, strict=True):
        seq.tokens.append(token)
        seq.round += 1


def expected(seq: Sequence) -> list[Token]:
    """What a greedy text goes on with."""
    tokens, judge = [*seq.tokens], target()
    for _ in range(K):
        tokens.append(int(judge.logits_after(tokens).argmax()))
    return tokens[-K:]


def test_a_chain_begins_behind_a_round_without_drafts():
    """For one text after some rounds without, for another for the first time: both are read up to their last token."""
    runner, seqs = model(), [text(1, 20), text(2, 9)]
    tried = drafter(runner)
    tried.propose(RoundView(seqs[:1], [K]))
    for token in (3, 4, 5):
        commit(seqs, [token, token])
    before = runner.read
    drafts = tried.propose(RoundView(seqs, [K, 2], in_flight(seqs, [6, 7], (0, 0)))) or []
    assert runner.read - before == 2 + 11  # the first chain has read one of those since, the second text is new
    commit(seqs, [6, 7])  # in a round that drafters were not shown
    assert [list(draft.tokens) for draft in drafts] == [expected(seqs[0]), expected(seqs[1])[:2]]
    before = runner.read
    tokens = [expected(seq)[0] for seq in seqs]  # accepted, or by the target itself
    drafts = tried.propose(RoundView(seqs, [K, K], in_flight(seqs, tokens, (K, 2)))) or []
    assert runner.read == before  # a chain reads what is new
    commit(seqs, tokens)
    assert [list(draft.tokens) for draft in drafts] == [expected(seq) for seq in seqs]
    tried.observe(seqs, drafts, [Verdict((token,)) for token in tokens])
    (draft, _) = tried.propose(RoundView(seqs, [K, 0])) or []
    assert list(draft.tokens) == expected(seqs[0])


@pytest.mark.parametrize("drafted", [(0, 1), None], ids=["another's draft", "unknown"])
def test_where_a_text_may_gain_more_the_round_in_flight_comes_first(drafted: tuple[int, ...] | None):
    seqs = [text(1, 20), text(2, 9)]
    assert drafter(model()).propose(RoundView(seqs, [K, K], in_flight(seqs, [6, 7], drafted))) is None


def test_a_text_whose_options_take_a_step_at_a_time_comes_first():
    seqs = [text(1, 20), text(2, 9, logit_bias={3: 1.0})]
    assert drafter(model()).propose(RoundView(seqs, [K, K], in_flight(seqs, [6, 7], (0, 0)))) is None


def test_a_long_text_is_read_on_while_others_draft():
    runner, seqs = model(), [text(1, 100), text(2, 9)]
    tried, counts = drafter(runner, max_round_tokens=40), []
    for _ in range(5):
        drafts = tried.propose(RoundView(seqs, [K, K], in_flight(seqs, [6, 7], (0, 0)))) or []
        counts.append([len(draft) for draft in drafts])
        commit(seqs, [6, 7])
        for seq, draft in zip(seqs, drafts, strict=True):
            assert list(draft.tokens) == (expected(seq) if draft else [])
    assert counts == [[0, K], [0, K], [K, K], [K, K], [K, K]]  # 31, 40 and 31 tokens


class OnAndOff(Controller):
    """Drafts for each sequence in some rounds, at random."""

    rng = random.Random(3)

    def plan(self, seq_ids: Seq[int], budgets: Seq[int]) -> Plan:
        lengths = [min(budget, K) if self.rng.random() < 0.5 else 0 for budget in budgets]
        kind = RoundKind(len(seq_ids), 1 + max(lengths), len(seq_ids) + sum(lengths))
        return Plan(kind, lengths, [0 if n else -1 for n in lengths], float(len(seq_ids)), 1.0, probe=True)

    def review(self, seq_ids: Seq[int], plan: Plan, drafted: Seq[int], expected: Seq[float]) -> list[bool]:
        return [True] * len(seq_ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_overlap_though_drafts_come_and_go(temperature: float):
    runner, draft_runner = target(), model()
    tried = drafter(draft_runner)
    controller = OnAndOff(members_of(tried), RoundCosts(PassTable({})), (1, 2, 4, 6, 8))
    made = controlled(runner, tried, controller, EngineLimits(max_batch=3))
    asked = [request([1 + i, 2, 3], max_tokens=60, temperature=temperature, seed=i, ignore_eos=True) for i in range(3)]
    for told, each in zip(run(made, asked), asked, strict=True):
        assert_same(told, ASYNC_TOY.judged(each))
    assert made.stats.all.accepted == made.stats.all.drafted > 50  # every chain was drafted after the very text
    assert draft_runner.chains > 20
    assert runner.followed > 0.8 * made.stats.passes / 3
