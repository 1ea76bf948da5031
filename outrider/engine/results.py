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


@dataclass(frozen=True, slots=True)
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
            "provenance": [asdict(each) for each in self.provenance],
            "stats": self.stats.as_dict(),
            "error": self.error,
            "others": [other.as_dict() for other in self.others],
        }

    def _repr_html_(self) -> str:
        """The text with accepted drafts shaded, and the figures; for notebooks."""
        shade = {"accepted": "#c7f0d2", "recovered": "#ffe1b8", "bonus": "#d6e4ff", "plain": "transparent"}
        spans = "".join(
            f'<span style="background:{shade[p.origin]};color:#111" title="{p.origin} {p.drafter}">'
            f"{html.escape(t)}</span>"
            for t, p in zip(self.pieces, self.provenance, strict=True)
        )
        tally = self.stats.all
        return (
            f'<div style="white-space:pre-wrap">{spans}</div><small>{self.stats.tokens} tokens, {tally.rounds} passes, '
            f"α {tally.alpha:.2f}, γ {tally.gamma:.1f}, τ {tally.tau:.2f}, "
            f"{self.stats.decode_tokens_per_second:.0f} tok/s</small>"
        )


@dataclass(frozen=True, slots=True)
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
