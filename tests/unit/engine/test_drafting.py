"""A drafter that fails costs time, never an answer: the text is that of plain decoding, and failures are counted."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import fields, replace
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch

from outrider.core.device_row import DeviceRow
from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.errors import LosslessError
from outrider.core.host_copy import HostCopy
from outrider.core.sampling import SamplingParams, Token
from outrider.core.sequence import Sequence, SequenceView, Span
from outrider.drafters.base import Drafter, RoundView, TargetPass, Traits
from outrider.drafters.guard import GuardedDrafter
from outrider.drafters.mix import Mix
from outrider.drafters.none import NoDraft
from outrider.engine.drafting import Drafting
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits, Request
from outrider.engine.stats import Stats
from outrider.runners.base import Scores
from outrider.runners.device_state import DeviceState
from outrider.testing.toy import ByteTokenizer, ToyRunner
from outrider.verify.base import make_verifier

VOCAB = 64
PROMPTS = ((1, 2, 3), (4, 5, 6), (7, 8, 9))
BAD = PROMPTS[1]
"""The prompt of the sequence that drafts go wrong for."""


class Once(Drafter):
    """Drafts well-formed nonsense; for one prompt it returns or does something else."""

    traits = Traits(name="once", max_tokens=4, follows_target=True)

    def __init__(self, wrong: Any = EMPTY, fails: str = "") -> None:
        """wrong: the draft, or a function of the budget; fails: the method that raises."""
        self.wrong, self.fails = wrong, fails
        self.forgotten: list[int] = []

    def propose(self, view: RoundView) -> list[Draft]:
        self._maybe_raise("propose", view.seqs)
        return [self._draft(seq, budget) for seq, budget in zip(view.seqs, view.budgets, strict=True)]

    def process(self, work: TargetPass) -> None:
        self._maybe_raise("process", work.seqs)

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        self._maybe_raise("observe", seqs)

    def forget(self, seq: Sequence) -> None:
        self.forgotten.append(seq.id)
        self._maybe_raise("forget", [seq])

    def _draft(self, seq: Sequence, budget: int) -> Any:
        if not is_bad(seq):
            return Draft((11,) * budget, source="once")
        return self.wrong(budget) if callable(self.wrong) else self.wrong

    def _maybe_raise(self, method: str, seqs: Seq[Sequence]) -> None:
        if method == self.fails and any(map(is_bad, seqs)):
            raise RuntimeError(f"{method} is broken")


def is_bad(seq: Sequence) -> bool:
    return tuple(seq.tokens[: seq.prompt_len]) == BAD


def answers(drafter: Drafter, mode: Any = "seeded", runner: ToyRunner | None = None) -> list[tuple[list[Token], Stats]]:
    """The texts of all prompts together, with their figures; the engine is whole afterwards."""
    tried = Engine(
        runner or ToyRunner(VOCAB), drafter, make_verifier(mode), ByteTokenizer(), limits=EngineLimits(max_batch=4)
    )
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    live = [tried.live(tried.submit(Request(prompt=prompt, params=params))[0]) for prompt in PROMPTS]
    while tried.busy:
        tried.step()
        tried.check()
    tried.check()
    return [(each.seq.tokens, each.stats) for each in live]


PLAIN = [tokens for tokens, _ in answers(NoDraft())]

Wrong = Callable[[int], Any]
MALFORMED: dict[str, Any] = {
    "no draft": None,
    "a tuple of tokens": (1, 2),
    "tokens of other types": Draft((1, "2")),  # pyright: ignore[reportArgumentType]
    "a float": Draft((1.0, 2)),  # pyright: ignore[reportArgumentType]
    "tokens that cannot be read": Draft(7),  # pyright: ignore[reportArgumentType]
    "too few parents": Draft((1, 2, 3), (-1, 0)),
    "too many parents": Draft((1, 2), (-1, 0, 1)),
    "a parent of another type": Draft((1, 2), (-1, None)),  # pyright: ignore[reportArgumentType]
    "a parent out of range": Draft((1, 2), (-1, 5)),
    "a negative parent": Draft((1, 2), (-1, -2)),
    "its own parent": Draft((1, 2), (-1, 1)),
    "a cycle": Draft((1, 2), (1, 0)),
    "a parent behind its child": Draft((1, 2, 3), (-1, 2, 0)),
    "probs of too few rows": Draft((1, 2), probs=torch.full((1, VOCAB), 1 / VOCAB)),
    "probs of one dimension": Draft((1,), probs=torch.ones(1)),
    "probs of no columns": Draft((1,), probs=torch.ones(1, 0)),
    "probs that are NaN": Draft((1,), probs=torch.full((1, VOCAB), float("nan"))),
    "probs that are infinite": Draft((1,), probs=torch.full((1, VOCAB), float("inf"))),
    "probs below 0": Draft((1,), probs=torch.eye(VOCAB)[:1] * 2 - 1 / VOCAB),
    "probs that sum to 2": Draft((1,), probs=torch.full((1, VOCAB), 2 / VOCAB)),
    "probs of one row that sum to 0": Draft((1, 2), probs=torch.eye(VOCAB)[:2] * torch.tensor([[1.0], [0.0]])),
    "probs that are whole numbers": Draft((1,), probs=torch.eye(VOCAB, dtype=torch.int64)[:1]),
    "probs that are sparse": Draft((1,), probs=torch.eye(VOCAB)[:1].to_sparse()),
    "probs without values": Draft((1,), probs=torch.eye(VOCAB, device="meta")[:1]),
    "a token beyond its probs": Draft((11,), probs=torch.full((1, 5), 0.2)),
    "siblings of the same token": Draft((1, 2, 1), (-1, -1, -1)),
    "tokens that are None": Draft(None),  # pyright: ignore[reportArgumentType]
    "probs that are a list": Draft((1,), probs=[[1.0]]),  # pyright: ignore[reportArgumentType]
    "a source that is no name": Draft((1,), source=["x"]),  # pyright: ignore[reportArgumentType]
    "an expectation that is no number": Draft((1,), expected=float("nan")),
    "known, and malformed all the same": Draft((1, 2), (1, 0), known=True),
}
CUT: dict[str, Wrong] = {
    "longer than its budget": lambda budget: Draft((11,) * (budget + 3)),
    "an id beyond the vocabulary": lambda budget: Draft((11, VOCAB)[:budget]),
    "a negative id": lambda budget: Draft((11, -1)[:budget]),
    "known, and beyond the vocabulary": lambda budget: Draft((11, 1 << 40)[:budget], known=True),
}


def test_one_that_does_not_observe_is_not_shown_what_became_of_its_drafts():
    deaf, hearing = Once(fails="observe"), Once(fails="observe")
    deaf.traits = replace(deaf.traits, observes=False)
    assert sum(stats.draft_failures for _, stats in answers(deaf)) == 0
    assert sum(stats.draft_failures for _, stats in answers(hearing)) > 5


@pytest.mark.parametrize("mode", ["seeded", "distribution"])
@pytest.mark.parametrize("wrong", [*MALFORMED, *CUT])
def test_a_malformed_draft_changes_no_text(wrong: str, mode: str):
    told = answers(Once((MALFORMED | CUT)[wrong]), mode)
    assert [tokens for tokens, _ in told] == PLAIN
    first, bad, last = (stats for _, stats in told)
    assert bad.draft_failures > 5
    assert first.draft_failures == last.draft_failures == 0
    assert first.all.drafted > 5 < last.all.drafted
    if wrong in MALFORMED:
        assert bad.all.drafted == 0
    assert bad.as_dict()["draft_failures"] == bad.draft_failures


@pytest.mark.parametrize("method", ["propose", "process", "observe", "forget"])
def test_an_exception_changes_no_text(method: str):
    drafter = Once(Draft((12,)), fails=method)
    told = answers(drafter)
    assert [tokens for tokens, _ in told] == PLAIN
    assert told[1][1].draft_failures >= 1
    assert sorted(drafter.forgotten) == [0, 1, 2]
    if method == "forget":
        assert [stats.draft_failures for _, stats in told] == [0, 1, 0]


def add_in_place(seq: Any) -> None:
    seq.tokens += [5]


CHANGES: dict[str, Callable[[Any], object]] = {
    "a token appended": lambda seq: seq.tokens.append(5),
    "tokens added": add_in_place,
    "a token replaced": lambda seq: operator.setitem(seq.tokens, 0, 5),
    "a token deleted": lambda seq: operator.delitem(seq.tokens, -1),
    "all tokens deleted": lambda seq: seq.tokens.clear(),
    "tokens sorted": lambda seq: seq.tokens.sort(),
    "an attribute deleted": lambda seq: delattr(seq, "seed"),
    "an attribute of its own": lambda seq: setattr(seq, "mine", 1),
    "its constraint advanced": lambda seq: seq.constraint.advance((1,)),
    **{
        f"{name} changed": partial(lambda seq, name, value: setattr(seq, name, value), name=name, value=value)
        for name, value in {
            "id": 99, "prompt_len": 0, "params": SamplingParams(), "seed": 5, "stop_ids": frozenset({1}), "limit": 2,
            "prediction": (1,), "max_draft": 0, "salt": "x", "constraint": None, "cached": 0, "round": 7,
            "finish": "stop", "stop_reason": 3,
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("method", ["propose", "process", "observe", "forget"])
def test_a_drafter_cannot_change_a_sequence(method: str, change: str):
    class Changing(Once):
        def _maybe_raise(self, method: str, seqs: Seq[Sequence]) -> None:
            for seq in seqs:
                if method == self.fails and is_bad(seq):
                    CHANGES[change](seq)

    told = answers(Changing(Draft((12,)), fails=method))
    assert [tokens for tokens, _ in told] == PLAIN
    assert told[1][1].draft_failures >= 1


@pytest.mark.parametrize("change", [lambda view: view.seqs.clear(), lambda view: operator.setitem(view.budgets, 0, 99)])
def test_a_drafter_cannot_change_a_round(change: Callable[[Any], object]):
    class Changing(Once):
        def propose(self, view: RoundView) -> Any:
            change(view)

    told = answers(Changing())
    assert [tokens for tokens, _ in told] == PLAIN
    assert min(stats.draft_failures for _, stats in told) > 5


def test_a_draft_that_is_changed_later_stays_as_it_was():
    class Later(Once):
        tokens, parents = [12, 13], [-1, 0]

        def process(self, work: TargetPass) -> None:
            self.tokens[:], self.parents[:] = [VOCAB + 7] * 9, [9] * 9

        def _draft(self, seq: Sequence, budget: int) -> Any:
            self.tokens[:], self.parents[:] = [12, 13][:budget], [-1, 0][:budget]
            return Draft(self.tokens, self.parents)

    told = answers(Later())
    assert [tokens for tokens, _ in told] == PLAIN
    assert [stats.draft_failures for _, stats in told] == [0, 0, 0]


def test_a_list_of_drafts_that_cannot_be_read_is_a_failure():
    class Broken(list[Draft]):
        def __iter__(self) -> Any:
            raise RuntimeError("no")

    class Returning(Once):
        def propose(self, view: RoundView) -> Any:
            return Broken([EMPTY] * len(view.seqs))

    told = answers(Returning())
    assert [tokens for tokens, _ in told] == PLAIN
    assert min(stats.draft_failures for _, stats in told) > 5


def test_a_view_shows_the_sequence_as_it_is_now():
    seq = Sequence(5, [1, 2, 3], 2, SamplingParams(), 7, salt="x", limit=9)
    view = SequenceView(seq)
    seq.tokens.append(4)
    seq.cached = 3
    for name in (*(each.name for each in fields(Sequence)), "generated", "pending", "room", "draw_seed", "unprocessed"):
        assert getattr(view, name) == getattr(seq, name), name
    tokens = view.tokens
    assert (tokens[-1], tokens[1:3], len(tokens), [*tokens], 4 in tokens) == (4, [2, 3], 4, [1, 2, 3, 4], True)
    assert (operator.add(tokens, [5]), tokens.index(3), tokens == SequenceView(seq).tokens, tokens == [1]) == (
        [1, 2, 3, 4, 5],
        2,
        True,
        False,
    )
    seq.tokens = [8]
    assert view.tokens == tokens == [8]
    assert isinstance(view, Sequence)
    with pytest.raises(AttributeError, match="only the engine changes a sequence: limit of sequence 5 is to be read"):
        view.limit = 10


def test_a_constraint_is_asked_and_not_advanced():
    seq = Sequence(0, [1], 1, SamplingParams(), 0)
    seq.constraint = Forced()  # pyright: ignore[reportAttributeAccessIssue]
    seen = SequenceView(seq).constraint
    assert seen is not None
    assert (seen.forced(), seen.done, seen.problem, seen.fork()) == ((21, 22), False, "", seq.constraint)
    with pytest.raises(AttributeError, match="advance a fork of it"):
        seen.advance((21,))


@pytest.mark.parametrize("returned", [None, [], [EMPTY], "drafts", 3, {}], ids=str)
def test_what_is_no_list_of_drafts_changes_no_text(returned: Any):
    class Wrong(Once):
        def propose(self, view: RoundView) -> Any:
            return returned

    told = answers(Wrong())
    assert [tokens for tokens, _ in told] == PLAIN
    failures = [stats.draft_failures for _, stats in told]
    assert min(failures) > (0 if returned == [EMPTY] else 5)  # one draft is right where one text is left


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_passes_through(interrupt: type[BaseException]):
    class Interrupted(Once):
        def propose(self, view: RoundView) -> list[Draft]:
            raise interrupt

    with pytest.raises(interrupt):
        answers(Interrupted())


def test_a_failure_is_logged_once_a_kind_and_then_once_a_second(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    now = [100.0]
    monkeypatch.setattr("outrider.drafters.guard.time.monotonic", lambda: now[0])
    guard = GuardedDrafter(Once(Draft((1, 2), (1, 0)), fails="observe"), VOCAB)
    seq = Sequence(5, list(BAD), 3, SamplingParams(), 0)
    with caplog.at_level(logging.WARNING, logger="outrider.drafters"):
        for _ in range(4):
            assert guard.propose(RoundView([seq], [4])) == [EMPTY]
            guard.observe([seq], [EMPTY], [Verdict((1,))])
        assert len(caplog.records) == 2
        assert "drafter once: a draft's parents are not before their children; no draft for: 5" in caplog.text
        assert "RuntimeError: observe is broken" in caplog.text
        now[0] += 1.5
        guard.propose(RoundView([seq], [4]))
        guard.propose(RoundView([seq], [4]))
    assert len(caplog.records) == 3
    assert (guard.take_failures(5), guard.take_failures(5)) == (10, 0)


# --- tensors ------------------------------------------------------------------------------------


def a_state() -> DeviceState:
    return DeviceState(torch.tensor([3]), torch.tensor([[1, 2]]), features=torch.zeros(1, 1, 2))


WRITES: dict[str, Callable[[DeviceState, torch.Tensor], object]] = {
    "a length": lambda state, logits: state.lengths.add_(1),
    "tokens": lambda state, logits: state.last.fill_(5),
    "a feature, by a view": lambda state, logits: state.features[0, 0].fill_(1),  # pyright: ignore[reportOptionalSubscript]
    "logits": lambda state, logits: logits.zero_(),
}


class Writing(Once):
    """Writes to what it is shown."""

    def __init__(self, write: Callable[[DeviceState, torch.Tensor], object]) -> None:
        super().__init__()
        self.write = write

    def propose(self, view: RoundView) -> list[Draft]:
        if view.state is not None:
            self.write(view.state, torch.zeros(1))
        return super().propose(view)

    def process(self, work: TargetPass) -> None:
        self.write(work.state or a_state(), work.scores.logits)


@pytest.mark.parametrize("write", [name for name in WRITES if name != "logits"])
def test_a_drafter_that_writes_to_the_devices_state_ends_the_engine(write: str):
    seq = Sequence(0, [1, 2, 3], 3, SamplingParams(), 0)
    guard = GuardedDrafter(Writing(WRITES[write]), VOCAB)
    with pytest.raises(LosslessError, match=r"drafter once: propose wrote to the target's tensors; clone"):
        guard.propose(RoundView([seq], [4], a_state()))
    whole = GuardedDrafter(Mix([Once(), Writing(WRITES[write])], VOCAB), VOCAB)
    with pytest.raises(LosslessError):
        whole.propose(RoundView([seq], [4], a_state()))


def test_a_drafter_that_writes_to_logits_ends_the_engine():
    with pytest.raises(LosslessError, match="process wrote to the target's tensors"):
        answers(Writing(WRITES["logits"]))


def test_a_write_to_a_models_logits_is_a_failure_like_others():
    class Inferring(ToyRunner):
        @torch.inference_mode()
        def score(self, spans: Seq[Span], after: DeviceState | None = None) -> Scores:
            return super().score(spans, after)

    told = answers(Writing(WRITES["logits"]), runner=Inferring(VOCAB))
    assert [tokens for tokens, _ in told] == PLAIN
    assert min(stats.draft_failures for _, stats in told) > 5


def test_what_the_drafter_is_shown_of_a_round_is_of_the_texts_that_go_on():
    """A text that fails is left out, with its logits; of no text nothing is shown."""

    class Broken(ToyRunner):
        def score(self, spans: Seq[Span], after: DeviceState | None = None) -> Scores:
            scores = super().score(spans, after)
            ends = list(accumulate((span.rows for span in spans), initial=0))
            for span, start in zip(spans, ends, strict=False):
                if span.tokens and (span.tokens[-1] in BAD or len(spans) == 1):
                    scores.logits[start : start + span.rows] = float("nan")
            return scores

    class Noting(Once):
        def process(self, work: TargetPass) -> None:
            seen.append((len(work.seqs), len(work.scores.logits) - sum(span.rows for span in work.spans)))
            assert not work.scores.logits.isnan().any()

    seen: list[tuple[int, int]] = []
    told = answers(Noting(), runner=Broken(VOCAB))
    assert told[1][0] == list(BAD)
    assert [stats.draft_failures for _, stats in told] == [0, 0, 0]
    assert {gap for _, gap in seen} == {0}
    assert min(count for count, _ in seen) > 0


# --- what the device knows already --------------------------------------------------------------


class Unread(HostCopy):
    """A block of tokens that nobody may wait for."""

    def __init__(self) -> None:
        pass

    def list(self) -> Any:
        raise AssertionError("waited for")


def proposed(drafting: Drafting, view: RoundView) -> list[Draft]:
    proposal = drafting.propose(view)
    assert proposal is not None
    return proposal.drafts


def test_tokens_on_the_device_are_cut_and_not_read():
    drafter = Once(Draft(DeviceRow(Unread(), 0, 4), DeviceRow(Unread(), 0, 4), known=True))
    seq = Sequence(0, list(BAD), 3, SamplingParams(), 0)
    drafting = Drafting(drafter, ToyRunner(VOCAB))
    for state in (None, DeviceState(torch.tensor([3]), torch.tensor([[2, 3]]))):
        (draft,) = proposed(drafting, RoundView([seq], [3], state))
        assert len(draft) == 3
        assert isinstance(draft.tokens, DeviceRow)
    assert drafting.take_failures(0) == 2  # one token more than asked for, twice


def test_with_a_state_none_is_an_answer_and_a_failure_is_none():
    class Ahead(Once):
        def propose(self, view: RoundView) -> Any:
            if self.fails:
                raise RuntimeError(self.fails)

    seq, state = Sequence(0, list(BAD), 3, SamplingParams(), 0), DeviceState(torch.tensor([3]), torch.tensor([[2, 3]]))
    drafting = Drafting(Ahead(), ToyRunner(VOCAB))
    assert drafting.propose(RoundView([seq], [3], state)) is None
    assert drafting.take_failures(0) == 0
    assert proposed(Drafting(Ahead(fails="yes"), ToyRunner(VOCAB)), RoundView([seq], [3], state)) == [EMPTY]


# --- forced tokens and runners of chains --------------------------------------------------------


class Forced:
    """A constraint that forces two tokens."""

    done, problem, allowed = False, "", None

    def fork(self) -> Forced:
        return self

    def forced(self) -> tuple[Token, ...]:
        return (21, 22)


def test_forced_tokens_come_first_and_the_drafter_is_not_asked():
    class Noting(Once):
        def propose(self, view: RoundView) -> list[Draft]:
            self.asked = [seq.id for seq in view.seqs]
            return super().propose(view)

        def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
            self.seen = list(zip((seq.id for seq in seqs), drafts, verdicts, strict=True))

    drafter = Noting()
    drafting = Drafting(drafter, ToyRunner(VOCAB))
    free, bound, idle = (Sequence(i, [1, 2, i], 1, SamplingParams(), 0) for i in range(3))
    bound.constraint = Forced()  # pyright: ignore[reportAttributeAccessIssue]
    drafts = proposed(drafting, RoundView([free, bound, idle], [3, 3, 0]))
    assert drafts == [Draft((11,) * 3, source="once"), Draft((21, 22), source="grammar", expected=2.0), EMPTY]
    assert drafter.asked == [0]
    verdicts = [Verdict((11, 5), (0,)), Verdict((21, 22, 5), (0, 1))]
    drafting.observe([free, bound], drafts[:2], verdicts)
    assert drafter.seen == [(0, drafts[0], verdicts[0]), (1, EMPTY, Verdict((21, 22, 5)))]


def test_a_runner_without_trees_gets_the_first_chain():
    class Chains(ToyRunner):
        scores_trees = False

    tree = Draft((1, 2, 3, 4), (-1, -1, 0, 1))
    seq = Sequence(0, list(BAD), 3, SamplingParams(), 0)
    for runner, tokens in ((ToyRunner(VOCAB), (1, 2, 3, 4)), (Chains(VOCAB), (1, 3))):
        (draft,) = proposed(Drafting(Once(tree), runner), RoundView([seq], [4]))
        assert draft.tokens == tokens
    assert [tokens for tokens, _ in answers(Once(tree), runner=Chains(VOCAB))] == PLAIN
