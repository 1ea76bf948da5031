"""Newcomers join the round launched behind one in flight: every text is plain decoding's, whoever comes or goes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch
from joining_play import (
    BLOCK,
    HEADS,
    LENGTHS,
    LONGEST,
    LOOKUPS,
    MODELS,
    Play,
    asks,
    begun,
    toys,
)
from plain_decoding import request
from repeating_toy import Guesser, RepeatingToy
from test_repeated_rounds import BREAKING, Breaking, Tried
from test_rounds_behind_rounds import at_random
from testbed import VOCAB, avoid_last
from torch import Tensor

from outrider.core.sampling import SamplingParams, Token
from outrider.core.sequence import Span
from outrider.drafters.base import TargetPass
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits, Request
from outrider.engine.round import InFlightRound
from outrider.runners.base import Scores
from outrider.runners.device_state import DeviceState


@pytest.mark.parametrize("drafter", ["none", "guesser", "trees", MODELS[0], BLOCK])
def test_newcomers_join_at_once_and_nothing_drains(drafter: str):
    """All but the last token is read in the step that follows, behind the round that is launched in it; the newcomer
    joins the round behind that one, which the third step completes."""
    asked = asks(len(LENGTHS), max_tokens=3)
    play = begun(drafter, asked)
    play.drained = 0
    for i, each in enumerate(asked):
        if i % 3 == 2:  # before the one before it ends
            play.submit(LONGEST)
            play.step(3)
        seq_id, before = play.submit(each), len(play.read)
        assert seq_id not in play.step()
        assert play.joined[-1] == seq_id
        assert [span.tokens for span in play.read[before:]] == ([each.prompt[:-1]] if len(each.prompt) > 1 else [])
        assert seq_id not in play.step()
        assert seq_id in play.step()
        assert play.drained == 0
    assert play.finish() == {"length"}
    assert len(play.joined) == len(asked) + len(asked) // 3


def launched(tried: Engine) -> list[InFlightRound]:
    """The rounds from now on."""
    found, launch = list[InFlightRound](), tried._launch

    def noted(after: InFlightRound | None = None) -> InFlightRound | None:
        made = launch(after)
        found.extend([made] if made is not None else [])
        return made

    tried._launch = noted
    return found


@pytest.mark.parametrize("drafter", [BLOCK, MODELS[0], *LOOKUPS])
def test_heads_and_lookups_draft_for_newcomers_at_once_and_others_are_not_asked(drafter: str):
    asked = asks(len(LENGTHS), max_tokens=9)
    play = begun(drafter, asked)
    rounds = launched(play.tried)
    for each in asked:
        play.submit(each)
        play.step(4)
    assert play.finish() == {"length"}
    joins = [each for each in rounds if any(seq.joined for seq in each.scheduled)]
    drafted = {
        bool(draft)
        for each in joins
        for seq, draft in zip(each.scheduled, each.drafts, strict=True)
        if seq.joined and each.behind
    }
    assert len(joins) > 5
    assert drafted == {drafter != MODELS[0]}
    assert play.tried.stats.draft_failures == 0


@pytest.mark.parametrize("drafter", ["none", "guesser"])
def test_where_a_text_ends_the_next_round_is_launched_before_it_is_gone(drafter: str):
    """So that the device has work while another comes in its place, which joins the round behind that."""
    short, *others = asks(3, (17,), max_tokens=30)
    play = begun(drafter, [short, *others], 2)
    play.submit(short)
    while play.tried.alive(play.joined[-1] if play.joined else 1):
        in_flight = len(play.tried._in_flight)
        play.step()
    assert in_flight == 1
    assert len(play.tried._in_flight) == 2
    assert play.tried._in_flight[-1].repeated
    play.drained, newcomer = 0, play.submit(others[0])
    play.step()
    assert play.joined[-1] == newcomer
    assert [each.seq.id for each in play.tried.scheduler.joining] == [newcomer]
    play.step()
    assert play.tried._in_flight[-1].scheduled[-1].seq.id == newcomer
    assert play.drained == 0
    assert play.finish() == {"length"}


@toys
def test_newcomers_in_every_step(drafter: str):
    """Several at once, more than the batch holds. Some have ended before the host knows that they began."""
    asked = [*asks(20), *asks(4, (17, 1, 33), n=3), *asks(5, logprobs=3)]
    asked = [
        replace(each, params=replace(each.params, max_tokens=(9, 1, 5, 1, 2)[i % 5])) for i, each in enumerate(asked)
    ]
    play = begun(drafter, asked, 4)
    for i, each in enumerate(asked):
        play.submit(each)
        play.step(int(i % 3 > 0 or i > 18))
    assert play.finish() == {"length"}
    assert len(play.joined) > 15


@pytest.mark.parametrize("drafter", ["none", "guesser", "mixed", "planned"])
@pytest.mark.parametrize("most", [9, 20])
def test_prompts_longer_than_a_round_may_read(drafter: str, most: int):
    """They do not join, and are read in chunks. No pass is longer than a round may be."""
    asked = asks(2 * len(LENGTHS), max_tokens=8)
    play = begun(drafter, asked, 4, most)
    widths, scored = list[int](), play.tried.target.score

    def score(spans: Seq[Span], after: DeviceState | None = None) -> Scores:
        widths.append(sum(span.width for span in spans))
        return scored(spans, after)

    play.tried.target.score = score
    for each in asked:
        play.submit(each)
        play.step(2)
    assert play.finish() == {"length"}
    assert {len(play.asked[i][0].prompt) < most for i in play.joined} == {True}
    assert 0 < len(play.joined) < len(asked)
    assert max(widths) <= most


@toys
def test_shared_prefixes(drafter: str):
    """The same prompt twice at once is read twice, and found by all that come later, as far as whole pages go."""
    (one,) = asks(1, (48,), max_tokens=9, temperature=1.0)
    asked = [replace(one, params=replace(one.params, seed=i)) for i in range(6)]
    asked += [replace(one, prompt=(*one.prompt, *range(1, 2 + i))) for i in range(2)]
    play = begun(drafter, asked)
    ids = [play.submit(each) for each in asked[:2]]
    play.step()
    ids += [play.submit(each) for each in asked[2:4]]
    play.step(4)
    ids += [play.submit(each) for each in asked[4:]]
    assert play.finish() == {"length"}
    assert [play.stats_of(seq_id).shared_tokens for seq_id in ids] == [0, 0, *[32] * 4, 48, 48]
    assert len(play.joined) >= 4


@pytest.mark.parametrize(
    ("figure", "drafter"),
    [("rows", "none"), ("passes", "guesser"), ("decisions", "auto"), ("decisions", "planned"), ("passes", MODELS[1])],
)
def test_figures_of_those_that_join(figure: str, drafter: str):
    """Rows of the rounds that `times` counts, passes that its tokens were in, decisions for all of its rounds."""
    asked = asks(8, max_tokens=2)
    play = begun(drafter, asked, 3)
    for each in asked:
        play.submit(each)
        play.step(2)
    assert play.finish() == {"length"}
    assert len(play.joined) > 3
    for seq_id in play.joined:
        stats = play.stats_of(seq_id)
        if figure == "rows":
            assert stats.rows <= 3 * stats.times.rounds
        elif figure == "passes":
            assert stats.passes == stats.all.rounds + sum(span.seq_id == seq_id for span in play.read)
        else:
            assert stats.decisions is not None
            assert stats.decisions.rounds == stats.all.rounds


class EvenTokens:
    """A constraint that the judge knows as `allowed_token_ids`."""

    done, problem = False, ""

    def allowed(self, paths: Seq[tuple[Token, ...]], stops: frozenset[Token]) -> Tensor:
        return (torch.arange(VOCAB) % 2 == 0).expand(len(paths), -1)

    def advance(self, tokens: Seq[Token]) -> None:
        assert not any(token % 2 for token in tokens)

    def forced(self) -> tuple[Token, ...]:
        return ()

    def fork(self) -> EvenTokens:
        return self


SHY: dict[str, dict[str, Any]] = {
    "a penalty": {"presence_penalty": 0.7},
    "not before its end": {"min_tokens": 9, "ignore_eos": False},
    "a processor": {"logits_processors": (avoid_last,)},
    "truncated": {"temperature": 1.0, "top_k": 4},
    "a constraint": {"allowed_token_ids": range(0, VOCAB, 2)},
}


@pytest.mark.parametrize("option", SHY)
@pytest.mark.parametrize("drafter", ["none", "guesser"])
def test_who_has_options_does_not_join(drafter: str, option: str):
    """The others are as they would be alone, and join before it came and once it has ended."""
    (shy,), (*asked, last) = asks(1, (17,), **({"seed": 70} | SHY[option])), asks(9)
    play = begun(drafter, [*asked, shy], 6)
    for each in asked[:4]:
        play.submit(each)
        play.step()
    before, made = len(play.joined), shy
    if option == "a constraint":
        made = replace(shy, params=replace(shy.params, allowed_token_ids=None), constraint=EvenTokens())
    seq_id = play.submit(made, shy)
    for each in asked[4:]:
        play.submit(each)
    while play.tried.alive(seq_id):
        play.step()
    play.submit(LONGEST)
    play.step(3)
    ended = play.submit(last)
    assert play.finish() <= {"length", "stop"}
    assert seq_id not in play.joined
    assert before > 0
    assert play.joined[-1] == ended


@toys
def test_newcomers_are_cancelled(drafter: str):
    """Before one joins, while the round that it joined is in flight, and behind that. Others take its pages at once."""
    asked = asks(24, (33, 17, 1, 16, 2), max_tokens=8)
    play = begun(drafter, asked, 4, cache_tokens=320)
    for i, each in enumerate(asked):
        seq_id = play.submit(each)
        if i % 2 == 0:
            play.step(i // 2 % 4)
            play.cancel(seq_id)
        play.step(i % 3)
    assert play.finish() == {"cancelled", "length"}
    assert len(play.joined) > 3


@toys
def test_some_are_preempted_while_others_join(drafter: str):
    asked = asks(12, (17, 1, 33, 16, 40), max_tokens=40)
    play = begun(drafter, asked, 4, cache_tokens=176)
    for i, each in enumerate(asked):
        play.submit(each)
        play.step(i % 4)
    assert play.finish() == {"length"}
    assert play.tried.stats.preemptions > 0
    assert play.joined


@pytest.mark.parametrize("drafter", ["none", "guesser"])
def test_a_newcomer_that_breaks_takes_nobody_with_it(drafter: str):
    """NaN behind some pairs of tokens, at the first token of some that join."""
    rng = random.Random(drafter)
    play = Play(Tried(drafter, target=Breaking(), world=BREAKING).engine, BREAKING)
    for i in range(24):
        prompt = [*rng.choices(range(1, VOCAB), k=rng.choice(LENGTHS)), *((13, 9) if i % 4 == 3 else ())]
        play.submit(request(prompt, temperature=1.0, seed=i, max_tokens=30, ignore_eos=True))
        play.step(2)
    assert play.finish() == {"error", "length"}
    ends = [(play.heard[i][-1].finish, len(play.heard[i])) for i in play.joined]
    assert ("error", 1) in ends
    assert {finish for finish, _ in ends} == {"error", "length"}


INTERRUPTED = [
    *((drafter, "target", method) for drafter in ("none", "guesser", "mixed") for method in ("read", "score", "keep")),
    *(("guesser", "drafter", method) for method in ("propose", "observe")),
    *(("mixed", "verifier", method) for method in ("judge", "decide")),
    ("guesser", "target", "score_and_choose"),
    ("suffix", "target", "advance"),
]


@pytest.mark.parametrize(("drafter", "part", "method"), INTERRUPTED)
def test_an_interrupt_where_newcomers_join(drafter: str, part: str, method: str):
    """Before or behind a call, while newcomers come in every step: all goes on, and every event is told."""
    joined = 0
    for at in range(1, 5):
        asked = asks(9, max_tokens=6)
        play, calls = begun(drafter, asked), iter(range(1, 1 << 30))
        real = getattr(getattr(play.tried, part), method)

        def called(*args: Any, real: Any = real, calls: Any = calls, at: int = at, **named: Any) -> Any:
            if method == "keep" and args[0].wanted:  # what is committed there is told of by no event, joined or not
                return real(*args, **named)
            now = next(calls) == at
            made = None if now and at % 2 else real(*args, **named)
            if now:
                raise KeyboardInterrupt
            return made

        setattr(getattr(play.tried, part), method, called)
        for each in asked:
            play.submit(each)
            play.step()
        assert play.finish() == {"length"}
        assert play.interrupts == 1
        joined += len(play.joined)
    assert joined > 3


def drafts_of(play: Play) -> dict[tuple[Any, ...], tuple[Token, ...]]:
    """Each draft that will be made, by the request and the length of the text that it continues."""
    drafter: Any = play.tried.drafter
    propose, made = drafter.propose, dict[tuple[Any, ...], tuple[Token, ...]]()

    def noted(view: Any) -> Any:
        drafts = propose(view)
        for i, (seq, draft) in enumerate(zip(view.seqs, drafts or (), strict=drafts is not None)):
            length = len(seq.tokens) if view.state is None else int(view.state.lengths[i])
            made[tuple(seq.tokens[: seq.prompt_len]), seq.seed, length] = tuple(draft.tokens)
        return drafts

    drafter.propose = noted
    return made


@pytest.mark.parametrize("head", HEADS)
def test_heads_read_the_prompts_of_those_that_join(head: str):
    """Later than the target. Their drafts are those of a text alone, also behind pages that others have read."""
    asked = asks(6, (33, 1, 16, 2, 40, 17), max_tokens=12)
    asked.append(replace(asked[0], params=replace(asked[0].params, seed=50)))
    play, alone = begun(head, asked, 5, cache_tokens=512), begun(head, [])
    made, expected, compared = drafts_of(play), drafts_of(alone), 0
    for each in asked:
        play.submit(each)
        play.step(2)
    assert play.finish() == {"length"}
    assert len(play.joined) > 3
    alone.finish()
    for each in asked:
        alone.submit(each)
        alone.finish()
    for place in expected.keys() & made.keys():
        shorter = min(len(expected[place]), len(made[place]))
        assert made[place][:shorter] == expected[place][:shorter]
        compared += shorter > 0 and place[1] != LONGEST.params.seed
    assert compared > 20


def at_random_plainly(rng: random.Random) -> Request:
    """Any request; of most, only options of those that can join are left."""
    made = at_random(rng)
    params, kept = made.params, ("temperature", "max_tokens", "ignore_eos", "stop", "logprobs", "seed", "n")
    if rng.random() < 0.7:
        params = SamplingParams(**{name: getattr(params, name) for name in kept})
    return replace(made, params=replace(params, max_tokens=min(params.max_tokens, 40)))


@toys
def test_at_random(drafter: str):
    """Everything together: come, join, wait, be cancelled, preempted, interrupted."""
    joined, ends = 0, set[str]()
    for seed in range(2 if drafter in (*LOOKUPS, "auto", "auto-with-model") else 3):
        rng = random.Random(f"{drafter} {seed}")
        asked = [at_random_plainly(rng) for _ in range(16)]
        play = begun(drafter, asked, rng.choice((2, 3, 5)), (40, 512, 20, 9)[seed], rng.choice((192, 256, 4096)))
        real = play._read

        def read(spans: Seq[Span], after: Any = None, real: Any = real, rng: random.Random = rng) -> Any:
            after = real(spans, after)
            if rng.random() < 0.1:
                raise KeyboardInterrupt
            return after

        play._read = read
        for each in asked:
            play.submit(each)
            play.step(rng.choice((0, 1, 1, 2, 5)))
            if rng.random() < 0.2:
                play.cancel(rng.choice([*play.heard]))
        ends |= play.finish()
        joined += len(play.joined)
    assert joined > 3
    assert ends >= {"cancelled", "length"}


class Follower(Guesser):
    """Notes what it is shown of each text, as one that keeps a cache of its own would."""

    def __init__(self, target: RepeatingToy) -> None:
        super().__init__(target)
        self.traits = replace(self.traits, follows_target=True)
        self.passes, self.prompts = Counter[int](), dict[int, list[Token]]()

    def process(self, work: TargetPass) -> None:
        assert len(work.scores.logits) == sum(span.rows for span in work.spans)
        for seq, span in zip(work.seqs, work.spans, strict=True):
            self.passes[seq.id] += span.wanted
            read = self.prompts.setdefault(seq.id, [])
            if not seq.generated and len(read) == span.start:  # the host is not behind there
                read += span.tokens


def test_who_follows_the_target_is_shown_all_that_it_reads():
    """The prompts of those that join, and every round, repeated or not."""
    tried = Tried(Follower, limits=EngineLimits(max_batch=4))
    play = Play(tried.engine)
    asked = [LONGEST, *asks(9, max_tokens=40)]
    for each in asked:
        play.submit(each)
        play.step(3)
    assert play.finish() == {"length"}
    assert len(play.joined) > 3
    assert tried.target.repeated > 10
    for seq_id, (made, _) in play.asked.items():
        assert tried.drafter.passes[seq_id] >= play.stats_of(seq_id).all.rounds
        assert tried.drafter.prompts[seq_id][: len(made.prompt) - 1] == [*made.prompt[:-1]]
