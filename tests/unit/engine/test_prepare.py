"""What start-up answers before the first request, on the toy model, which captures and compiles nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from outrider.drafters.none import NoDraft
from outrider.drafters.registry import parse_drafter
from outrider.engine.engine import Engine
from outrider.engine.prepare import OPTIONS, answer_batches, prepare, warm_up_batches
from outrider.engine.request import EngineLimits
from outrider.testing.toy import ByteTokenizer, ToyRunner
from outrider.verify.base import Mode, make_verifier


class Noting:
    """A progress that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def start(self, label: str, total: int | None) -> None:
        self.told.append((label, total))

    def advance(self, amount: int) -> None:
        self.told.append(amount)

    def done(self) -> None:
        self.told.append("done")


@pytest.mark.parametrize("mode", ["seeded", "distribution"])
@pytest.mark.parametrize(("context", "max_batch"), [(8192, 8), (64, 3), (16, 1)])
def test_every_kind_of_request_is_answered_and_leaves_nothing(mode: Mode, context: int, max_batch: int):
    target = ToyRunner(257)
    target.context = context
    limits = EngineLimits(max_batch=max_batch, max_round_tokens=256)
    engine = Engine(target, NoDraft(), make_verifier(mode, "block"), ByteTokenizer(), limits=limits)
    batches = warm_up_batches(target, limits)
    assert list(answer_batches(engine, batches)) == [*range(len(batches) + 1)]
    engine.check()
    assert engine.stats.tokens == 4 * sum(len(batch) for batch in batches)


def test_the_requests_have_every_option_and_all_sizes_of_batch_and_prompt():
    target, limits = ToyRunner(257), EngineLimits(max_batch=8, max_round_tokens=500)
    target.context = 2000
    batches = warm_up_batches(target, limits)
    single = [batch[0] for batch in batches if len(batch) == 1]
    lengths = {len(request.prompt) for request in single}
    assert {1, 33, 128, 500, 1995} <= lengths  # the longest leaves room for what is generated
    assert max(lengths) == 1995
    assert {len(batch) for batch in batches} >= {1, 2, 4, 8}
    for options in OPTIONS:
        assert any(all(getattr(r.params, name) == value for name, value in options.items()) for r in single)
    assert any(request.constraint is not None for request in single)


def test_captures_are_told_and_nothing_is_answered_where_nothing_is_compiled():
    class Capturing(ToyRunner):
        asked: tuple[int, int] = (0, 0)

        def capture(self, batch: int, width: int) -> Iterator[str]:
            self.asked = batch, width
            yield from ("passes of 1 x 1", "passes of 2 x 1")

    target, progress = Capturing(257), Noting()
    drafter = parse_drafter("prompt-lookup:k=6")
    limits = EngineLimits(max_batch=2)
    built = NoDraft()
    built.traits = drafter.traits
    prepare(target, built, make_verifier("seeded", "block"), ByteTokenizer(), limits, progress)
    assert target.asked == (2, 7)
    assert progress.told == [("capturing passes", None), 1, 1, "done"]
    assert target.device == torch.device("cpu")


def test_a_runner_that_captures_nothing_tells_nothing():
    progress = Noting()
    prepare(ToyRunner(257), NoDraft(), make_verifier("seeded", "block"), ByteTokenizer(), EngineLimits(), progress)
    assert progress.told == []
