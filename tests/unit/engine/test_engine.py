"""The engine's interface: what it refuses, what it returns, what it demands of a drafter and a target."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from types import SimpleNamespace

import pytest

from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.errors import ConfigError, OutriderError, RequestError
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence, Span
from outrider.engine import engine as engine_module
from outrider.engine.engine import Engine
from outrider.engine.events import Event
from outrider.engine.request import EngineLimits, Request
from outrider.engine.round import InFlightRound
from outrider.runners.base import Scores
from outrider.runners.device_state import DeviceState
from outrider.testing.drafters import ScriptedDrafter, random_trees
from outrider.testing.toy import ByteTokenizer, ToyRunner
from outrider.verify.base import make_verifier

VOCAB = 64


def nothing(seq: Sequence, budget: int) -> Draft:
    return EMPTY


def engine(
    script: Callable[[Sequence, int], Draft] = nothing, *, target: ToyRunner | None = None, **limits: int
) -> Engine:
    return Engine(
        target or ToyRunner(VOCAB, context=100, cache_tokens=160),
        ScriptedDrafter(script),
        make_verifier("seeded"),
        ByteTokenizer(),
        eos_ids={0},
        limits=EngineLimits(**limits),
    )


def ask(prompt: tuple[int, ...] = (1, 2, 3), **options: object) -> Request:
    return Request(prompt=prompt, params=SamplingParams(**options))  # pyright: ignore[reportArgumentType]


def finish(tried: Engine) -> list[Event]:
    events: list[Event] = []
    while tried.busy:
        events += tried.step()
        tried.check()
    return events


def greedy(tried: Engine, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Plain decoding, past any end."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(tried.target.logits_after(text).argmax()))  # pyright: ignore[reportAttributeAccessIssue]
    return tuple(text[len(prompt) :])


REFUSED: dict[str, tuple[Request, tuple[str, ...]]] = {
    "no prompt": (Request(prompt=()), ("prompt is empty", "at least one token")),
    "an id too high": (Request(prompt=(1, VOCAB)), (f"token {VOCAB}", f"0 to {VOCAB - 1}")),
    "an id below zero": (Request(prompt=(1, -1)), ("token -1", f"0 to {VOCAB - 1}")),
    "an id that is no whole number": (Request(prompt=(1, 2.5)), ("2.5", f"0 to {VOCAB - 1}")),  # pyright: ignore[reportArgumentType]
    "an id that is text": (Request(prompt=(1, "a")), ("'a'", f"0 to {VOCAB - 1}")),  # pyright: ignore[reportArgumentType]
    "a prediction of unknown ids": (Request(prompt=(1,), prediction=(9, 70)), ("token 70", f"0 to {VOCAB - 1}")),
    "a draft below zero": (Request(prompt=(1,), max_draft=-1), ("max_draft", "at least 0", "-1")),
    "a draft that is no whole number": (Request(prompt=(1,), max_draft=2.5), ("max_draft", "2.5")),  # pyright: ignore[reportArgumentType]
    "a draft that is text": (Request(prompt=(1,), max_draft="3"), ("max_draft", "'3'")),  # pyright: ignore[reportArgumentType]
    "a prompt as long as the context": (Request(prompt=(1,) * 100), ("100 tokens", "context", "shorten")),
    "an unknown bias": (ask(logit_bias={64: 1.0}), ("logit_bias", "64", "0 to 63")),
    "an unknown allowed id": (ask(allowed_token_ids=(3, 99)), ("allowed_token_ids", "99", "0 to 63")),
    "an unknown banned id": (ask(banned_token_ids=(-2,)), ("banned_token_ids", "-2", "0 to 63")),
    "an unknown stop id": (ask(stop_token_ids=(1000,)), ("stop_token_ids", "1000", "0 to 63")),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_refused_and_why(why: str):
    """Each message says what is wrong, and what would work. Nothing is left behind."""
    request, words = REFUSED[why]
    tried = engine()
    with pytest.raises(RequestError) as raised:
        tried.submit(request)
    for word in words:
        assert word in str(raised.value)
    assert not tried.busy
    tried.check()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -0.1}, ("temperature", "at least 0", "-0.1")),
        ({"temperature": float("nan")}, ("temperature", "finite")),
        ({"top_p": 0.0}, ("top_p", "above 0", "0.0")),
        ({"top_p": 1.5}, ("top_p", "at most 1", "1.5")),
        ({"min_p": 2}, ("min_p", "at most 1")),
        ({"typical_p": 0}, ("typical_p", "above 0")),
        ({"top_k": -1}, ("top_k", "at least 0")),
        ({"top_k": 1.5}, ("top_k", "whole number", "1.5")),
        ({"repetition_penalty": 0}, ("repetition_penalty", "above 0")),
        ({"presence_penalty": float("inf")}, ("presence_penalty", "finite")),
        ({"frequency_penalty": "high"}, ("frequency_penalty", "'high'")),
        ({"max_tokens": 0}, ("max_tokens", "at least 1")),
        ({"max_tokens": True}, ("max_tokens", "whole number")),
        ({"min_tokens": 9, "max_tokens": 8}, ("min_tokens (9)", "max_tokens (8)")),
        ({"n": 0}, ("n must be", "at least 1")),
        ({"seed": -1}, ("seed", "at least 0")),
        ({"seed": 1 << 64}, ("seed", "at most")),
        ({"logprobs": 1000}, ("logprobs", "at most")),
        ({"stop": ("",)}, ("stop string", "1 to")),
        ({"stop": ("x" * 5000,)}, ("stop string", "1 to")),
        ({"stop": ("x",) * 100}, ("stop strings", "100")),
        ({"allowed_token_ids": ()}, ("allowed_token_ids", "leave it out")),
        ({"logit_bias": {3: float("nan")}}, ("logit_bias", "finite")),
    ],
)
def test_what_sampling_parameters_refuse(options: dict[str, object], words: tuple[str, ...]):
    with pytest.raises(RequestError) as raised:
        SamplingParams(**options)  # pyright: ignore[reportArgumentType]
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("name", ["max_batch", "max_round_tokens"])
def test_limits_are_at_least_one(name: str):
    with pytest.raises(ConfigError, match=f"{name} must be a whole number from 1 to [0-9]+, got 0"):
        EngineLimits(**{name: 0})


def test_a_prompt_the_cache_cannot_hold_says_so():
    tried = engine(target=ToyRunner(VOCAB, context=500, cache_tokens=32))
    with pytest.raises(RequestError, match=r"32 tokens.*cache holds 32.*enlarge the cache"):
        tried.submit(ask((1,) * 32))
    tried.submit(ask((1,) * 31))
    assert [event.finish for event in finish(tried)] == ["length"]


@pytest.mark.parametrize(("context", "cache", "room"), [(40, 160, 40), (100, 48, 48)])
def test_text_ends_where_context_or_cache_do(context: int, cache: int, room: int):
    tried = engine(random_trees(VOCAB).script, target=ToyRunner(VOCAB, context=context, cache_tokens=cache))
    tried.submit(ask(max_tokens=500, ignore_eos=True))
    events = finish(tried)
    tokens = tuple(token for event in events for token in event.tokens)
    assert tokens == greedy(tried, (1, 2, 3), room - 3)
    assert events[-1].finish == "length"


def test_an_idle_engine_has_no_events():
    tried = engine()
    assert not tried.busy
    assert tried.step() == []
    assert tried.stats.tokens == tried.stats.passes == 0
    tried.check()


def test_ids_are_never_used_twice():
    tried = engine()
    first = tried.submit(ask(n=3, max_tokens=2))
    finish(tried)
    second = tried.submit(ask(n=2, max_tokens=2))
    assert len({*first, *second}) == 5


def test_a_prompt_of_one_token():
    tried = engine()
    tried.submit(ask((5,), max_tokens=4, ignore_eos=True))
    assert tuple(t for event in finish(tried) for t in event.tokens) == greedy(tried, (5,), 4)


def test_the_first_of_n_texts_is_the_text_of_one():
    texts: list[list[tuple[int, ...]]] = []
    for n in (1, 4):
        tried = engine()
        ids = tried.submit(ask(n=n, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True))
        events = finish(tried)
        texts.append([tuple(t for e in events if e.seq_id == i for t in e.tokens) for i in ids])
    assert texts[1][0] == texts[0][0]
    assert len(set(texts[1])) == 4


def test_without_a_seed_texts_differ_and_the_seed_can_be_read():
    tried = engine()
    ids = [tried.submit(ask(temperature=1.0, max_tokens=12, ignore_eos=True))[0] for _ in range(2)]
    seeds = [tried.live(i).seq.seed for i in ids]
    events = finish(tried)
    texts = [tuple(t for e in events if e.seq_id == i for t in e.tokens) for i in ids]
    assert texts[0] != texts[1]
    again = [tried.submit(ask(temperature=1.0, max_tokens=12, ignore_eos=True, seed=seed))[0] for seed in seeds]
    events = finish(tried)
    assert texts == [tuple(t for e in events if e.seq_id == i for t in e.tokens) for i in again]


def test_a_request_that_wants_no_draft_is_never_drafted_for():
    asked: list[int] = []

    def script(seq: Sequence, budget: int) -> Draft:
        asked.append(seq.id)
        return Draft((1,) * budget)

    tried = engine(script)
    (plain,) = tried.submit(Request(prompt=(1, 2), params=SamplingParams(max_tokens=6, ignore_eos=True), max_draft=0))
    (drafted,) = tried.submit(ask(max_tokens=6, ignore_eos=True))
    events = finish(tried)
    assert set(asked) == {drafted}
    assert {p.origin for e in events if e.seq_id == plain for p in e.provenance} == {"plain"}


def test_a_budget_is_never_more_than_what_is_left():
    budgets: list[tuple[int, int]] = []

    def script(seq: Sequence, budget: int) -> Draft:
        budgets.append((budget, seq.room))
        return EMPTY

    tried = engine(script)
    tried.submit(ask(max_tokens=9, ignore_eos=True))
    finish(tried)
    assert budgets == [(6, 8), (6, 7), (5, 6), (4, 5), (3, 4), (2, 3), (1, 2)]


def test_a_target_that_scores_no_trees_gets_the_chain_of_first_children():
    seen: list[Draft] = []

    class ChainsOnly(ToyRunner):
        scores_trees = False

        def score(self, spans: Seq[Span], after: DeviceState | None = None) -> Scores:
            seen.extend(span.draft for span in spans if len(span.draft))
            return super().score(spans, after)

    tree = Draft((4, 9, 8, 7), (-1, -1, 1, 0))
    tried = engine(lambda seq, budget: tree.first_nodes(budget), target=ChainsOnly(VOCAB))
    tried.submit(ask(max_tokens=12, ignore_eos=True))
    events = finish(tried)
    assert seen[0].tokens == (4, 7)
    assert all(draft.is_chain for draft in seen)
    assert tuple(t for e in events for t in e.tokens) == greedy(tried, (1, 2, 3), 12)


def test_what_a_drafter_says_beyond_its_budget_is_cut():
    widths: list[int] = []

    class Watched(ToyRunner):
        def score(self, spans: Seq[Span], after: DeviceState | None = None) -> Scores:
            widths.extend(len(span.draft) for span in spans)
            return super().score(spans, after)

    tried = engine(lambda seq, budget: Draft((1,) * 50), target=Watched(VOCAB), max_round_tokens=5)
    tried.submit(ask(max_tokens=20, ignore_eos=True))
    finish(tried)
    assert max(widths) == 4  # five tokens a round, one of them text


def test_a_drafter_sees_the_committed_text_and_its_verdict():
    seen: list[tuple[list[int], Draft, tuple[int, ...]]] = []

    class Noted(ScriptedDrafter):
        def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
            super().observe(seqs, drafts, verdicts)
            seen.extend((list(s.tokens), d, v.tokens) for s, d, v in zip(seqs, drafts, verdicts, strict=True))

    tried = Engine(ToyRunner(VOCAB), Noted(nothing), make_verifier("seeded"), ByteTokenizer())
    tried.submit(ask(max_tokens=3))
    finish(tried)
    text = greedy(tried, (1, 2, 3), 3)
    assert [(tokens[3:], verdict) for tokens, _, verdict in seen] == [([*text[: i + 1]], (text[i],)) for i in range(3)]


def test_the_counts_of_provenance_add_up():
    """The first of each draft right, the second wrong: a round brings one accepted token and one recovered."""
    target = ToyRunner(VOCAB)

    def script(seq: Sequence, budget: int) -> Draft:
        right = int(target.logits_after(seq.tokens).argmax())
        after = int(target.logits_after([*seq.tokens, right]).argmax())
        return Draft((right, (after + 1) % VOCAB), source="half").first_nodes(budget)

    tried = engine(script, target=target)
    tried.submit(ask(max_tokens=9, ignore_eos=True))
    events = finish(tried)
    origins = [[p.origin for p in event.provenance] for event in events]
    # the last draft is one token long, since there is room for two: nothing is left to refuse
    assert origins == [["plain"], *[["accepted", "recovered"]] * 3, ["accepted", "bonus"]]
    assert [p.round for event in events for p in event.provenance] == [0, 1, 1, 2, 2, 3, 3, 4, 4]
    stats = events[-1].stats
    assert stats is not None
    assert (stats.all.rounds, stats.all.drafted, stats.all.accepted, stats.all.rejected) == (5, 7, 4, 3)
    assert stats.all.emitted == stats.tokens == 9
    assert stats.drafters["half"].rounds == 4


def test_only_the_last_event_carries_figures_and_the_engine_sums_them():
    tried = engine()
    tried.submit(ask(max_tokens=5, ignore_eos=True))
    tried.submit(ask((4,), max_tokens=7, ignore_eos=True))
    events = finish(tried)
    ended = [event.stats for event in events if event.stats is not None]
    assert len(ended) == 2
    assert [event.finish is not None for event in events] == [event.stats is not None for event in events]
    assert tried.stats.tokens == 12 == sum(stats.tokens for stats in ended)
    assert tried.stats.prompt_tokens == 4


def test_what_is_done_once_a_round_was_told_counts_as_the_next_rounds(monkeypatch: pytest.MonkeyPatch):
    """The host's work for drafts would seem to take no time if it came after the times were told."""
    now = [0.0]
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    told: list[float] = []

    def tell(drafting: object, done: InFlightRound, *others: object) -> None:
        told.append(done.times.total)
        now[0] += len(told)

    monkeypatch.setattr(engine_module, "tell_controller", tell)
    tried = engine()
    tried.submit(ask(max_tokens=4, ignore_eos=True))
    finish(tried)
    assert told == [0.0, 1.0, 2.0, 3.0]
    now[0] += 1000.0  # nothing was asked of the engine
    assert tried.step() == []
    tried.submit(ask(max_tokens=2, ignore_eos=True))
    finish(tried)
    assert told[4:] == [4.0, 5.0]


def test_check_notices_a_page_that_leaked():
    tried = engine()
    tried.target.pool.open(99, [1])
    tried.target.pool.reserve(99, 20)
    with pytest.raises(OutriderError, match="idle, yet 2 pages in use"):
        tried.check()


def test_live_is_for_texts_that_have_not_ended():
    tried = engine()
    (seq_id,) = tried.submit(ask(max_tokens=2))
    assert tried.live(seq_id).seq.prompt_len == 3
    finish(tried)
    with pytest.raises(KeyError):
        tried.live(seq_id)


def test_logits_are_asked_for_only_where_needed():
    """A chunk that does not reach the end of its prompt asks for no rows."""
    rows: list[list[int]] = []

    class Watched(ToyRunner):
        def score(self, spans: Seq[Span], after: DeviceState | None = None) -> Scores:
            rows.append([span.rows for span in spans])
            return super().score(spans, after)

    tried = engine(target=Watched(VOCAB), max_round_tokens=10)
    tried.submit(ask(tuple(range(1, 26)), max_tokens=2, ignore_eos=True))
    finish(tried)
    assert rows == [[0], [0], [1], [1]]


class _Faulty(ScriptedDrafter):
    """Breaks off the step after so many rounds: an interrupt, or a fault of its own."""

    def __init__(self, rounds: int) -> None:
        super().__init__(lambda seq, budget: EMPTY)
        self.left = rounds

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("broken", [1, 3, 4])
def test_a_step_broken_off_loses_nothing_that_was_committed(broken: int):
    told: list[list[int]] = []
    for rounds in (0, broken):
        engine = Engine(ToyRunner(), _Faulty(rounds), make_verifier("seeded"), ByteTokenizer())
        for first in (1, 2):
            engine.submit(Request(prompt=(first, 2), params=SamplingParams(max_tokens=2 + first, ignore_eos=True)))
        texts: dict[int, list[int]] = {0: [], 1: []}
        ends = 0
        while engine.busy:
            try:
                events = engine.step()
            except KeyboardInterrupt:
                continue
            for event in events:
                texts[event.seq_id] += event.tokens
                ends += event.finish is not None
        engine.check()
        assert ends == 2
        told.append([*texts[0], -1, *texts[1]])
    assert told[0] == told[1]


def test_a_text_cancelled_after_a_broken_step_ends_once():
    engine = Engine(ToyRunner(), _Faulty(2), make_verifier("seeded"), ByteTokenizer())
    (seq_id,) = engine.submit(Request(prompt=(1, 2), params=SamplingParams(max_tokens=9, ignore_eos=True)))
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    event = engine.cancel(seq_id)
    assert event is not None
    assert event.finish == "cancelled"
    assert not engine.busy
    assert engine.step() == []
