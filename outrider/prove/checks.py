"""The results of a proof: checks, each with its status, and whether all of them hold. Data only."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["holds", "tie", "fails", "not checked"]
EVIDENCE = "evidence"
"""The key of figures that pooled checks are computed from; reports leave them out."""
POOLED = "pooled_mode"
"""The key of a figure that pooled tests have: the mode whose rows they pool, or "server"."""
HOLDS, FAILS, INCOMPLETE = 0, 1, 3  # exit codes; 2 is bad input


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison and its result."""

    group: str
    """server, rounding, rules, texts or sampled."""
    name: str
    status: Status
    """tie: the texts differ, and the scores of the two tokens are within the tolerance for rounding."""
    detail: str = ""
    figures: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Proof:
    """All checks of one model or server."""

    subject: dict[str, Any]
    """The subject of the proof: model or server, drafter, device, number format, options."""
    checks: list[Check]
    seconds: float

    def count(self, status: Status) -> int:
        return sum(check.status == status for check in self.checks)

    @property
    def exit_code(self) -> int:
        if self.count("fails"):
            return FAILS
        return INCOMPLETE if self.count("not checked") or not self.checks else HOLDS

    @property
    def verdict(self) -> str:
        """One sentence."""
        ties = self.count("tie")
        if self.exit_code == FAILS:
            return f"does not hold: {self.count('fails')} of {len(self.checks)} checks fail"
        if self.exit_code == INCOMPLETE:
            return (
                f"incomplete: no check fails, and {self.count('not checked')} of {len(self.checks)} could not be made"
            )
        within = f", {ties} of them up to ties within rounding" if ties else ""
        return f"holds: all {len(self.checks)} checks{within}"

    @property
    def headline(self) -> str:
        """The verdict and, where nothing fails, how much was compared and how small a fault would have shown."""
        return " ".join([f"{self.verdict}.", *([] if self.exit_code == FAILS else self.shown)])

    @property
    def shown(self) -> list[str]:
        """Sentences on how many texts are equal and, for each mode, how small a fault the sampled tests would show."""
        same = [c.figures["tokens"] for c in self.checks if c.status == "holds" and "tokens" in c.figures]
        sentences = [f"{len(same):,} texts of {sum(same):,} tokens are the same, token by token."] if same else []
        pooled = [check for check in self.checks if POOLED in check.figures and check.status != "fails"]
        modes = dict.fromkeys(check.figures[POOLED] for check in pooled)
        sentences += [_power(mode, [c for c in pooled if c.figures[POOLED] == mode]) for mode in modes]
        return sentences if modes else [*sentences, "No sampled texts were compared with the target's distribution."]

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": {HOLDS: "holds", FAILS: "fails", INCOMPLETE: "incomplete"}[self.exit_code],
            "shown": self.shown,
            "subject": self.subject,
            "checks": [asdict(check) | {"figures": _shown(check)} for check in self.checks],
            "seconds": self.seconds,
        }


def _power(mode: str, tests: Seq[Check]) -> str:
    """A sentence on how small a fault the pooled tests of a mode would have shown."""
    seen: dict[str, float] = {}
    for check in tests:
        bias, towards = check.figures["visible_bias"], check.figures["towards"]
        if bias is not None:
            seen[towards] = min(bias, seen.get(towards, bias))
    compared = max(check.figures["compared"] for check in tests)
    sampled = f"{compared:,} sampled tokens ({mode})"
    if not seen:
        return f"{sampled} are too few to show a fault of any size; raise --draws."
    moved = ", or ".join(f"{100 * bias:.1f} % to {towards}" for towards, bias in seen.items())
    return f"In {sampled} a fault that moves probability, {moved}, would have shown; a smaller one may not have."


def _shown(check: Check) -> dict[str, Any]:
    """The figures without those that pooled checks are computed from."""
    return {name: value for name, value in check.figures.items() if name != EVIDENCE}
