"""What goes wrong where a round would be repeated: texts are right, and the fault is counted where it is one."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import pytest
from repeating_toy import Guesser, RepeatingToy
from test_repeated_rounds import Tried, asks, finish
from test_rounds_behind_rounds import Place, interrupt

from outrider.core.draft import EMPTY, Draft
from outrider.core.errors import LosslessError
from outrider.core.host_copy import HostCopy
from outrider.drafters.base import RoundView


class Wrong(Guesser):
    """Its `repeat` answers as `answer` says, every `every`-th time; else as it should."""

    def __init__(self, target: RepeatingToy, answer: Answer, every: int) -> None:
        super().__init__(target)
        self.answer, self.every = answer, every
        self.wrong = self.failed = 0
        """How often it answered so, and for how many texts."""

    def repeat(self, view: RoundView, drafts: Seq[Draft]) -> Any:
        made = super().repeat(view, drafts)
        if self.repeats % self.every:
            return made
        self.wrong, self.failed = self.wrong + 1, self.failed + len(view.seqs)
        return self.answer(self, view, made)


Answer = Callable[[Wrong, RoundView, Any], Any]


def fails(drafter: Wrong, view: RoundView, made: Any) -> Any:
    raise RuntimeError("repeat is broken")


FAILURES: dict[str, Answer] = {
    "raises": fails,
    "no copy": lambda drafter, view, made: 3,
    "drafts": lambda drafter, view, made: [EMPTY] * len(view.seqs),
    "the tensor itself": lambda drafter, view, made: made.tokens,
    "another tensor": lambda drafter, view, made: HostCopy(made.tokens.clone()),
    "a view of the same memory": lambda drafter, view, made: HostCopy(made.tokens[:]),
}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("answer", FAILURES)
def test_a_drafter_that_answers_wrongly_is_asked_as_ever(answer: str, every: int):
    """Texts are right, the failure is counted for all that it was asked for, and nothing is scored again by it."""
    tried = Tried(lambda target: Wrong(target, FAILURES[answer], every))
    asked = asks(3, 1.0, max_tokens=60)
    repeated = tried.check(asked)
    assert tried.drafter.wrong > 0
    assert tried.engine.stats.draft_failures == tried.drafter.failed
    assert repeated == tried.drafter.repeats - tried.drafter.wrong
    assert tried.engine.stats.all.accepted > 0.3 * tried.engine.stats.all.drafted


@pytest.mark.parametrize("every", [1, 3])
def test_a_drafter_that_has_to_be_asked_does_not_fail(every: int):
    tried = Tried(lambda target: Wrong(target, lambda *_: None, every))
    repeated = tried.check(asks(3, 1.0, max_tokens=60))
    assert repeated == tried.drafter.repeats - tried.drafter.wrong
    assert tried.drafter.wrong > 0
    assert tried.engine.stats.draft_failures == 0


def test_a_drafter_that_writes_to_the_state_is_found_out():
    def writes(drafter: Wrong, view: RoundView, made: Any) -> Any:
        assert view.state is not None
        view.state.lengths.add_(1)
        return made

    tried = Tried(lambda target: Wrong(target, writes, 2))
    with pytest.raises(LosslessError, match="repeat wrote to the target's tensors"):
        tried.check(asks(2, 0.0))


PLACES = {
    "the draft": Place(lambda tried: tried.drafter, "repeat"),
    "the pass": Place(lambda tried: tried.target, "repeat"),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_before_a_round_is_repeated(place: str):
    """The others go on as if nothing had been."""
    asked = asks(3, 1.0)
    for at in (1, 2, 5):
        tried, interrupts = Tried(), 0
        first, *others = (tried.engine.submit(each)[0] for each in asked)
        texts = [tried.engine.live(seq_id).seq for seq_id in others]
        interrupt(tried.engine, PLACES[place], at)
        while tried.engine.busy:
            try:
                tried.engine.step()
            except KeyboardInterrupt:
                interrupts += 1
                tried.engine.cancel(first)
            tried.engine.check()
        assert interrupts == 1
        for text, each in zip(texts, asked[1:], strict=True):
            assert tuple(text.tokens[text.prompt_len :]) == tried.world.judged(each)[0].tokens


def test_a_pass_that_breaks_takes_no_text_with_it():
    tried = Tried()

    def breaks(scores: object) -> Any:
        raise RuntimeError("out of memory")

    tried.target.repeat = breaks
    ids = [tried.engine.submit(each)[0] for each in asks(3, 1.0)]
    with pytest.raises(RuntimeError, match="out of memory"):
        finish(tried.engine)
    tried.target.pool.check()
    for seq_id in ids:
        assert tried.engine.cancel(seq_id) is not None
    tried.engine.check()
    assert tried.target.pool.used == 0
