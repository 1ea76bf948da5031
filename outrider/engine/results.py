"""What an answer is once it has ended: its text, and how it came about; and two of them compared."""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass
from typing import Any

from outrider.core.errors import OutriderError
from outrider.core.outputs import Provenance, TokenLogprob
from outrider.core.sampling import Token
from outrider.core.sequence import FinishReason
from outrider.engine.events import Event
from outrider.engine.stats import Stats

SHADES = {  # translucent, so that text keeps the colour of its theme, dark or light
    "accepted": "rgba(46,160,67,.35)",
    "recovered": "rgba(219,140,20,.40)",
    "bonus": "rgba(56,139,253,.35)",
    "plain": "transparent",
}
REPR_CHARS = 60


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """One finished text and how it came about."""

    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason
    stop_reason: Token | str | None
    logprobs: tuple[TokenLogprob, ...]
    provenance: tuple[Provenance, ...]
    pieces: tuple[str, ...]
    """The text that each token made ready to show."""
    stats: Stats
    seed: int
    error: str = ""
    others: tuple[Result, ...] = ()
    """The other texts, where n > 1."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "seed": self.seed,
            "logprobs": [asdict(each) for each in self.logprobs],
            "provenance": [each._asdict() for each in self.provenance],
            "stats": self.stats.as_dict(),
            "error": self.error,
            "others": [other.as_dict() for other in self.others],
        }

    @property
    def token_ids(self) -> tuple[Token, ...]:
        """The same as `tokens`, by the name other engines have for it."""
        return self.tokens

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= REPR_CHARS else f"{self.text[:REPR_CHARS]}..."
        error = f" ({self.error})" if self.error else ""
        more = f", {len(self.others)} others" if self.others else ""
        return (
            f"<Result: {text!r}, {len(self.tokens)} tokens, {self.finish_reason}{error}, τ {self.stats.tau:.2f}{more}>"
        )

    def _repr_html_(self) -> str:
        """The text, each token shaded by where it came from, and the main figures; for notebooks."""
        spans = "".join(
            f'<span style="background:{SHADES[p.origin]}" title="{html.escape(f"{p.origin} {p.drafter}")}">'
            f"{html.escape(t)}</span>"
            for t, p in zip(self.pieces, self.provenance, strict=True)
        )
        rest = html.escape(self.text[sum(map(len, self.pieces)) :])
        return f'<div style="white-space:pre-wrap">{spans}{rest}</div><small>{self.stats.summary()}</small>'


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """The same request, plain and speculative, one after the other in one run."""

    speculative: Result
    plain: Result

    @property
    def identical(self) -> bool:
        return self.speculative.tokens == self.plain.tokens and self.speculative.text == self.plain.text

    @property
    def first_difference(self) -> int | None:
        """Place of the first token that differs, from 0; None where the texts are identical."""
        if self.identical:
            return None
        pairs = zip(self.plain.tokens, self.speculative.tokens, strict=False)
        shorter = min(len(self.plain.tokens), len(self.speculative.tokens))
        return next((i for i, (one, other) in enumerate(pairs) if one != other), shorter)

    @property
    def speedup(self) -> float:
        plain = self.plain.stats.decode_tokens_per_second
        return self.speculative.stats.decode_tokens_per_second / plain if plain else 0.0

    def __repr__(self) -> str:
        return f"<Comparison: {self._verdict()}>"

    def _repr_html_(self) -> str:
        """The speculative text as its own HTML, and both runs' figures; for notebooks."""
        runs = {"plain": self.plain, "speculative": self.speculative}
        rows = "".join(f"<tr><td>{name}</td><td>{run.stats.summary()}</td></tr>" for name, run in runs.items())
        return f"{self.speculative._repr_html_()}<table>{rows}</table><b>{self._verdict()}</b>"

    def _verdict(self) -> str:
        where = self.first_difference
        same = "identical" if where is None else f"first difference at token {where}"
        return f"{same}, speed-up {self.speedup:.2f}x"


def build_result(events: list[Event], seed: int, others: tuple[Result, ...] = ()) -> Result:
    """The result of a sequence's events, the last of which ended it."""
    last = events[-1]
    if last.finish is None or last.stats is None:
        raise OutriderError("a text was asked for before it ended")
    return Result(
        text="".join(e.text for e in events),
        tokens=tuple(t for e in events for t in e.tokens),
        finish_reason=last.finish,
        stop_reason=last.stop_reason,
        logprobs=tuple(p for e in events for p in e.logprobs),
        provenance=tuple(p for e in events for p in e.provenance),
        pieces=tuple(p for e in events for p in e.pieces),
        stats=last.stats,
        seed=seed,
        error=last.error,
        others=others,
    )
