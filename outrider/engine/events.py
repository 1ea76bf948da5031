"""What a round tells whoever listens, and the pure steps that make it from a verdict."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.core import Draft, FinishReason, Provenance, Sequence, Token, TokenLogprob, Verdict
from outrider.engine.stats import Stats, ends_in_refusal
from outrider.engine.text import TextStream
from outrider.verify.law import token_logprobs


@dataclass(frozen=True, slots=True)
class Event:
    """What one round brought one sequence."""

    seq_id: int
    tokens: tuple[Token, ...] = ()
    pieces: tuple[str, ...] = ()
    """What may be shown with each token; characters still in the making come with a later one."""
    text: str = ""
    """All that may be shown now: the pieces, or what was held back when a text ends early."""
    logprobs: tuple[TokenLogprob, ...] = ()
    provenance: tuple[Provenance, ...] = ()
    finish: FinishReason | None = None
    stop_reason: Token | str | None = None
    """The stop id or string that ended the text, where one did."""
    error: str = ""
    stats: Stats | None = None
    """The request's figures, with its last event."""


def extend(seq: Sequence, tokens: tuple[Token, ...], stream: TextStream) -> tuple[str, ...]:
    """Append tokens up to the first stop or the length limit: the one place that decides where text ends.

    Returns the text each kept token makes ready to show. A stop token is kept and not
    shown; a stop string is neither shown nor followed by any token.
    """
    pieces: list[str] = []
    for token in tokens:
        seq.tokens.append(token)
        may_stop = seq.generated >= seq.params.min_tokens
        if may_stop and token in seq.stop_ids:
            seq.finish, seq.stop_reason = "stop", token
            pieces.append("")
            break
        pieces.append(stream.push(token, may_stop=may_stop))
        if stream.stopped is not None:
            seq.finish, seq.stop_reason = "stop", stream.stopped
            return tuple(pieces)
        if seq.room <= 0:
            seq.finish = "length"
            break
    if seq.finish is not None:
        pieces[-1] += stream.flush()
        if stream.stopped is not None:  # a stop string that only the end of the text could complete
            seq.finish, seq.stop_reason = "stop", stream.stopped
    return tuple(pieces)


def provenance_of(draft: Draft, verdict: Verdict, round_: int) -> tuple[Provenance, ...]:
    """Who brought each token of the verdict."""
    accepted = tuple(Provenance("accepted", draft.source, i, round_) for i in range(verdict.accepted))
    if not len(draft):
        last = Provenance("plain", "", 0, round_)
    elif ends_in_refusal(draft, verdict):
        last = Provenance("recovered", draft.source, verdict.accepted, round_)
    else:
        last = Provenance("bonus", draft.source, verdict.accepted, round_)
    return (*accepted, last)


def logprobs_of(seq: Sequence, verdict: Verdict, kept: tuple[Token, ...], logits: Tensor) -> tuple[TokenLogprob, ...]:
    """The target's log-probabilities of the kept tokens; logits [1 + draft, vocab] are its raw scores."""
    if seq.params.logprobs is None:
        return ()
    rows = [0, *(node + 1 for node in verdict.path)][: len(kept)]
    return tuple(token_logprobs(logits[rows], list(kept), seq.params.logprobs))
