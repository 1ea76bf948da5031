"""Rounds at start that tell what asking drafters takes, at every size of batch, where rounds overlap.

The time of a pass says little of that: the host works for every sequence meanwhile, which takes longer than the passes
of small models. After these rounds no plan is made whose cost nobody knows. They are run by an engine of their own, on
the same model and drafters.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq

from outrider.control.controller import Controller
from outrider.control.costs import RoundKind
from outrider.control.plan import Plan, plain_plan
from outrider.core.sampling import SamplingParams
from outrider.drafters.base import Drafter
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits, Request
from outrider.engine.text import Detokenizer
from outrider.runners.base import Runner
from outrider.verify.base import Verifier

SECONDS = 2.0
"""No further size of batch is begun after this many seconds."""
_ROUNDS, _FEWEST = 32, 4
"""Rounds of each kind, and the fewest where texts have little room: the first and the last ones tell nothing, since
rounds of other kinds are next to them, and early ones are slower."""
_LENGTH = 1
"""Tokens asked for: the host's work for drafters hardly depends on it, and the shortest pass hides least of it."""
_PROMPT = 20
_MAX_GAIN = 8
"""Tokens that a text has room for in each of those rounds."""


class _Script(Controller):
    """Plans rounds without drafts, then rounds of each drafter, and notes what they take."""

    def __init__(self, controller: Controller, room: int) -> None:
        """room: tokens of a text."""
        super().__init__(controller.members, controller.costs, controller.widths)
        self.rounds = max(_FEWEST, min(_ROUNDS, room // (1 + len(self.members)) - 2))
        """The number of rounds of each kind."""
        self.took: dict[RoundKind, list[float]] = {}
        self.left = [-1, *range(len(self.members))]
        """Whose rounds are still to come; -1: without drafts."""

    def plan(self, seq_ids: Seq[int], budgets: Seq[int]) -> Plan:
        batch, who = len(seq_ids), self.left.pop(0) if self.left else -1
        plain = plain_plan(batch, self.costs)
        if who < 0:
            return Plan(plain.kind, plain.lengths, plain.drafters, plain.tokens, plain.seconds, rounds=self.rounds)
        member = self.members[who]
        steps = next((n for n in member.lengths if n >= _LENGTH), _LENGTH) * member.runs_model
        lengths = [min(_LENGTH, budget) for budget in budgets]
        kind = RoundKind(batch, 1 + max(lengths), batch + sum(lengths), (member.name,), steps)
        kind = self.costs.padded_kind(kind, self.widths)
        asked = [who if n else -1 for n in lengths]
        return Plan(kind, lengths, asked, float(batch), self.costs.seconds(kind), rounds=self.rounds)

    def note_plain(self, plan: Plan, seq_ids: object, seconds: Seq[float]) -> None:
        for each in seconds:
            self._note_took(plan.kind, each)

    def note_seconds(self, plan: Plan, drafted: Seq[int], seconds: float, rounds: int = 1) -> None:
        self._note_took(self.prices.kind_of(plan, drafted), seconds)

    def _note_took(self, kind: RoundKind, seconds: float) -> None:
        if seconds > 0:
            self.took.setdefault(kind, []).append(seconds)


def rehearse(
    target: Runner,
    drafter: Drafter,
    verifier: Verifier,
    tokenizer: Detokenizer,
    limits: EngineLimits,
    controller: Controller,
) -> None:
    """Let the controller know what rounds take with each of its drafters, where the target's rounds overlap.

    Nothing is told where context or cache have no room for a made-up text.
    """
    if not target.asynchronous or _room(target) < 1:
        return
    end = time.perf_counter() + SECONDS
    batches = [1 << i for i in range(limits.max_batch.bit_length())]
    for batch in (1, *batches):  # 1 twice: the first rounds of all are slower
        if time.perf_counter() > end:
            return
        script = _Script(controller, _room(target))
        engine = Engine(target, drafter, verifier, tokenizer, limits=limits, controller=script)
        for _ in _steps(engine, batch, script):
            pass
        _tell(controller, script.took)


def _steps(engine: Engine, batch: int, script: _Script) -> Iterator[None]:
    """Run rounds of `batch` texts, until all kinds are done."""
    target = engine.target
    tokens = min(_room(target), (1 + len(script.members)) * (script.rounds + 2) * _MAX_GAIN)
    prompt = tuple(i % min(13, target.vocab_size) for i in range(_PROMPT))
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1)
    ids = [i for _ in range(batch) for i in engine.submit(Request(prompt=prompt, params=params, salt="start-up"))]
    spare = script.rounds + 2
    while engine.busy and spare:
        spare -= not script.left
        engine.step()
        yield
    for seq_id in ids:
        engine.cancel(seq_id)


def _room(target: Runner) -> int:
    """Max tokens behind a made-up prompt."""
    return min(target.context, target.pool.count * target.pool.size) - _PROMPT


def _tell(controller: Controller, took: Mapping[RoundKind, Seq[float]]) -> None:
    """Tell the controller what rounds took: those without drafts first, since others are compared with them, and of a
    drafter's kinds the most frequent last, so that it counts.

    Of each kind the first quartile counts: other work of the host makes rounds slower, and the next one seem fast, and
    a drafter that seems too expensive is not tried again.
    """
    for kind in sorted(took, key=lambda each: (not each.plain, len(took[each]))):
        controller.costs.start_with(kind, sorted(took[kind])[len(took[kind]) // 4])
