"""The findings about a target and a draft, and the verdict that follows from them. Data only."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "note", "caution", "padding", "option", "cross", "refuse"]
"""ok: nothing wrong. note: worth knowing. caution: the pair works and gains less. padding: it works, with vocabularies
that differ in length. option: it works with an option that `fix` names. cross: it works only through cross-model.
refuse: it does not work."""
Verdict = Literal["use", "use with padding", "needs cross-vocabulary", "refuse"]
CODES = {"refuse": 2, "cross": 1, "option": 1}
"""Exit codes by the worst level; 0 for others."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    code: str
    """Short and stable, such as `token-ids`."""
    level: Level
    what: str
    consequence: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Smoke:
    """The figures of a few seconds of drafting."""

    tokens: int
    rounds: int
    drafted: int
    by_position: tuple[float, ...]
    """For each position, the share of drafts that were accepted up to it."""
    tau: float
    """Tokens for each pass of the target, its own token included."""
    failures: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All findings about a pair."""

    target: str
    draft: str
    kind: str
    """draft-model, or the kind of the head."""
    drafter: str
    """As `--drafter` takes it."""
    findings: Seq[Finding]
    options: tuple[str, ...] = ()
    """Further options that the pair needs."""
    smoke: Smoke | None = None

    def has(self, level: Level) -> bool:
        return any(finding.level == level for finding in self.findings)

    @property
    def verdict(self) -> Verdict:
        if self.has("refuse"):
            return "refuse"
        if self.has("cross"):
            return "needs cross-vocabulary"
        return "use with padding" if self.has("padding") else "use"

    @property
    def exit_code(self) -> int:
        """0: use it as it is; 1: it needs an option or cross-model; 2: it cannot draft for this target."""
        return max((CODES.get(finding.level, 0) for finding in self.findings), default=0)

    @property
    def command(self) -> str:
        """The command to run next; empty where the pair is refused."""
        if self.verdict == "refuse":
            return ""
        return " ".join(["outrider serve", self.target, "--drafter", self.drafter, *self.options])

    def as_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "draft": self.draft,
            "kind": self.kind,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "drafter": self.drafter,
            "command": self.command,
            "findings": [asdict(finding) for finding in self.findings],
            "smoke": None if self.smoke is None else asdict(self.smoke),
        }
