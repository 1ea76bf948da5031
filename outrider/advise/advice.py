"""The advice: measures all candidates, verifies the best few by running them, and chooses one, or none and says why."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outrider.advise.candidates import Candidate
from outrider.advise.export import Choice
from outrider.advise.measure import MAX_REPEATS, Cell, Runs, Scope, make_llm, measure, measure_again
from outrider.advise.measured import Measured
from outrider.core.errors import ConfigError
from outrider.llm import LLM

VERIFIED = 2
"""The number of candidates that are verified by running them."""
MIN_GAIN = 1.03
"""The smallest measured speed-up that counts as a gain: less is not worth keeping a second model."""
MIN_ALPHA = 0.5
SHORT_ANSWER = 16
MAX_ROW_PRICE = 0.25
"""If a further row costs more than this share of a pass, the load is bound by arithmetic, not by memory."""

Tell = Callable[[str, str], None]
"""Called with the drafter's name and what is being done with it."""


@dataclass(frozen=True, slots=True)
class Verified:
    """A drafter that was run beside plain decoding, on the same prompts."""

    drafter: str
    length: int | None
    """Tokens of each draft; None: the controller chose the lengths."""
    temperature: float
    batch: int
    predicted: float | None
    measured: float
    error: float
    """The error of `measured`: two standard errors over the repetitions, as a share of it."""
    tau: float
    identical: bool
    """Whether all texts equal those of plain decoding."""
    repetitions: int
    """The number of runs with drafts, and of runs without."""

    @property
    def gain(self) -> float:
        """The measured speed-up, at most τ: a round with drafts takes at least as long as a plain one."""
        return min(self.measured, self.tau)

    @property
    def gains(self) -> bool:
        """Whether it is clearly faster than plain decoding."""
        return self.gain >= MIN_GAIN and self.measured * (1 - self.error) > 1

    @property
    def told(self) -> str:
        return f"{self.measured:.2f} x plain decoding (± {self.error:.0%}), {self.tau:.2f} tokens a pass"


@dataclass(slots=True)
class Advice:
    """What `outrider advise` says."""

    target: str
    facts: dict[str, str]
    """Facts of the machine and the load, by name."""
    measured: list[Measured] = field(default_factory=list[Measured])
    unfit: dict[str, str] = field(default_factory=dict[str, str])
    """Why candidates do not fit the target, by drafter."""
    verified: list[Verified] = field(default_factory=list[Verified])
    chosen: Verified | None = None
    reasons: list[str] = field(default_factory=list[str])
    memory: int = 0
    """Bytes of the chosen drafter's weights."""
    shipped: str = ""
    """Folder of the head that is shipped for the target; "" for none."""

    def of(self, drafter: str) -> Measured:
        return next(each for each in self.measured if each.drafter == drafter)

    def as_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "facts": self.facts,
            "speculate": self.chosen is not None,
            "chosen": None if self.chosen is None else asdict(self.chosen),
            "reasons": self.reasons,
            "memory_bytes": self.memory,
            "shipped": self.shipped,
            "verified": [asdict(each) for each in self.verified],
            "measured": [each.as_json() for each in self.measured],
            "unfit": self.unfit,
        }


class Adviser:
    """Measures candidates for one target. Each result is passed to `keep`; results known from an earlier run are not
    measured again."""

    def __init__(
        self, target: str, scope: Scope, options: dict[str, Any], tell: Tell, keep: Callable[[Measured], None]
    ) -> None:
        """options: further options of LLM."""
        self.target, self.scope, self._options, self._tell, self._keep = target, scope, options, tell, keep

    def run(self, candidates: Seq[Candidate], known: Seq[Measured], advice: Advice) -> Advice:
        """Measure the candidates that are not in `known`, verify the best few, and fill in `advice`."""
        for candidate in candidates:
            before = next((each for each in known if each.drafter == candidate.drafter), None)
            try:
                advice.measured.append(before or self._measure(candidate))
            except ConfigError as error:
                advice.unfit[candidate.drafter] = str(error)
        lengths: dict[str, dict[Cell, int]] = {}
        for found in self._best(advice.measured):
            lengths[found.drafter] = {cell: found.best_length(*cell) for cell in self.scope.cells}
            advice.verified += self._verify_first(found, lengths[found.drafter])
        decide(advice, self.scope)
        if advice.verified:
            fastest = advice.chosen or max(advice.verified, key=lambda each: each.gain)
            advice.verified += self._verify_others(advice.of(fastest.drafter), lengths[fastest.drafter])
        return advice

    def _measure(self, candidate: Candidate) -> Measured:
        self._tell(candidate.drafter, "loading")
        with make_llm(self.target, candidate.drafter, self.scope, self._options, adaptive=False) as llm:
            found = measure(llm, candidate, self.scope, lambda what: self._tell(candidate.drafter, what))
        self._keep(found)
        return found

    def _best(self, measured: Seq[Measured]) -> list[Measured]:
        """The VERIFIED drafters with the highest predicted speed-ups in the first cell."""
        temperature, batch = self.scope.first
        return sorted(measured, key=lambda each: -each.best_speedup(temperature, batch))[:VERIFIED]

    def _verify_first(self, found: Measured, lengths: dict[Cell, int]) -> list[Verified]:
        """Measure all cells again, then run the first cell twice: with its best length and with the controller."""
        rows: list[Verified] = []
        for adaptive in (False, True):
            with make_llm(self.target, found.drafter, self.scope, self._options, adaptive=adaptive) as llm:
                if not adaptive:
                    measure_again(llm, found, self.scope, lengths, lambda what: self._tell(found.drafter, what))
                    self._keep(found)
                self._tell(found.drafter, "verified with the controller" if adaptive else "verified")
                length = None if adaptive else lengths[self.scope.first]
                rows.append(self._run_beside_plain(llm, found, length, self.scope.first))
        return rows

    def _verify_others(self, found: Measured, lengths: dict[Cell, int]) -> list[Verified]:
        """Run the cells of the largest batch and of the other temperatures, each with its best length."""
        temperature, batch = self.scope.first
        cells = [(temperature, self.scope.batches[-1]), *((other, batch) for other in self.scope.temperatures[1:])]
        self._tell(found.drafter, "verified in other cells")
        with make_llm(self.target, found.drafter, self.scope, self._options, adaptive=False) as llm:
            others = [cell for cell in cells if cell != self.scope.first]
            return [self._run_beside_plain(llm, found, lengths[cell], cell) for cell in others]

    def _run_beside_plain(self, llm: LLM, found: Measured, length: int | None, cell: Cell) -> Verified:
        """Run plain decoding and the drafter in turn, so that a change of the machine's speed affects both."""
        temperature, batch = cell
        runs = Runs(llm, self.scope.groups(batch), temperature, self.scope.max_tokens)
        runs.repeat((0, length), MAX_REPEATS)
        predicted = None if length is None else found.speedup(temperature, batch, length)
        same = runs.texts(0) == runs.texts(length)
        figures = runs.speedup(length), runs.error(length), runs.tau(length)
        return Verified(found.drafter, length, temperature, batch, predicted, *figures, same, len(runs.done[length]))


def decide(advice: Advice, scope: Scope) -> None:
    """Choose the drafter that was fastest in the first cell, of those with a clear gain and equal texts, or none.

    Fills in `chosen`, `memory` and `reasons` of the advice.
    """
    first = [each for each in advice.verified if (each.temperature, each.batch) == scope.first]
    sound = [each for each in first if each.identical]
    best = max((each for each in sound if each.gains), key=lambda each: each.gain, default=None)
    if best is None:
        advice.reasons = [*_different(first), *_not_clear(sound), *why_not(advice, scope), *_disturbed(first)]
        return
    choice = Choice(advice.target, best.drafter, best.length or 1, advice.shipped)
    advice.chosen, advice.memory = best, drafter_bytes(choice)
    found = advice.of(best.drafter)
    upto = found.break_even(best.temperature)
    top = f"up to a batch of {upto}" if upto else "at no batch that was measured"
    advice.reasons = [
        f"{best.told}, at batch {best.batch}",
        f"predicted to gain {top}; batches of {', '.join(map(str, found.batches))} were timed",
    ]
    if best.length is None:
        advice.reasons.append("the controller drafts as far as pays in each round, and nothing where nothing pays")
    advice.reasons += _disturbed(first)


def why_not(advice: Advice, scope: Scope) -> list[str]:
    """Why no drafter gains, in sentences about the drafter with the highest predicted speed-up."""
    temperature, batch = scope.first
    if not advice.measured:
        return ["no drafter fits this target"]
    near = max(advice.measured, key=lambda each: each.best_speedup(temperature, batch))
    length, speedup = near.best_length(temperature, batch), near.best_speedup(temperature, batch)
    chances = near.longest(temperature).conditional
    plain, drafted = (near.rounds[temperature, batch, 0, n] for n in (0, near.max_tokens))
    reasons = [f"the best, {near.drafter} with drafts of {length}, is predicted at {speedup:.2f} x plain decoding"]
    if chances and chances[0] < MIN_ALPHA:
        reasons.append(
            f"its first draft token is accepted in {chances[0]:.0%} of rounds that have one, which is below half"
        )
    share = drafted.draft / max(near.lengths) / plain.total
    if share > MAX_ROW_PRICE:
        reasons.append(f"drafting one token takes {share:.0%} of a plain round: the draft is too large or too slow")
    rows = 1 + sum(near.longest(temperature).drafted)
    price = (drafted.verify / plain.verify - 1) / max(1e-9, rows - 1)
    if price > MAX_ROW_PRICE:
        reasons.append(f"a further row costs {price:.0%} of a pass: arithmetic, not memory, bounds this load")
    if near.answer_tokens < SHORT_ANSWER:
        reasons.append(f"answers have {near.answer_tokens:.0f} tokens: most of the time goes into reading prompts")
    return reasons


def _different(rows: Seq[Verified]) -> list[str]:
    names = sorted({each.drafter for each in rows if not each.identical})
    return [
        f"{name}: some texts differ from plain decoding; `outrider prove` says whether they are ties" for name in names
    ]


def _not_clear(rows: Seq[Verified]) -> list[str]:
    """A sentence on the highest speed-up of the runs; nothing where there are none."""
    best = max(rows, key=lambda each: each.gain, default=None)
    return [] if best is None else [f"run beside plain decoding, {best.drafter} came to {best.told}: no clear gain"]


def _disturbed(rows: Seq[Verified]) -> list[str]:
    """A warning where a measured speed-up is above τ, more than drafts can bring; else nothing."""
    beyond = [each for each in rows if each.measured * (1 - each.error) > each.tau]
    if not beyond:
        return []
    return [f"{beyond[0].drafter} cannot be that fast: other programs disturbed the times; run it again without them"]


def drafter_bytes(choice: Choice) -> int:
    """Bytes of the weight files of a drafter's model; 0 where it has no model, or the files are not on this machine."""
    model = Path(choice.model)
    if model.is_file():
        return model.stat().st_size
    return sum(file.stat().st_size for file in model.glob("*.safetensors")) if model.name else 0
