"""What a proof finds: checks, each with its status, and whether all of them hold. Data only."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["holds", "tie", "fails", "not checked"]
EVIDENCE = "evidence"
"""Of the figures, those that other checks are made of."""
HOLDS, FAILS, INCOMPLETE = 0, 1, 3  # exit codes; 2 is bad input


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison and what came of it."""

    group: str
    """rounding, rules, texts or sampled."""
    name: str
    status: Status
    """tie: the texts differ, where the two best tokens are nearer to each other than rounding moves them."""
    detail: str = ""
    figures: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Proof:
    """All checks of one model or server."""

    subject: dict[str, Any]
    """What was proved: model or server, drafter, device, number format, options."""
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

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": {HOLDS: "holds", FAILS: "fails", INCOMPLETE: "incomplete"}[self.exit_code],
            "subject": self.subject,
            "checks": [asdict(check) | {"figures": _shown(check)} for check in self.checks],
            "seconds": self.seconds,
        }


def _shown(check: Check) -> dict[str, Any]:
    """The figures without those that other checks are made of."""
    return {name: value for name, value in check.figures.items() if name != EVIDENCE}
