"""The events of a round, and the pure functions that make them from verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.errors import ModelError, RequestError
from outrider.core.outputs import Provenance, TokenLogprob
from outrider.core.sampling import Token
from outrider.core.sequence import FinishReason, Sequence
from outrider.engine.judged import JudgedDraft
from outrider.engine.stats import Stats
from outrider.engine.text import TextStream
from outrider.verify.logprobs import token_logprobs

_new = tuple.__new__  # a named tuple of all its fields, in half the time


class Event(NamedTuple):
    """What one round added to one sequence."""

    seq_id: int
    tokens: tuple[Token, ...] = ()
    pieces: tuple[str, ...] = ()
    """What may be shown with each token; unfinished characters come with a later one."""
    text: str = ""
    """All that may be shown now: the pieces, or what was held back when a text ends early."""
    logprobs: tuple[TokenLogprob, ...] = ()
    judged: JudgedDraft | None = None
    """What came of its draft; None where there are no tokens."""
    finish: FinishReason | None = None
    stop_reason: Token | str | None = None
    """The stop id or string that ended the text, where one did."""
    error: str = ""
    """Why the text failed, where `finish` is `error`."""
    at_fault: Literal["", "request", "model"] = ""
    """Whose fault that is: the request's options left no token to choose, or the model's logits are no numbers."""
    stats: Stats | None = None
    """The request's figures, with its last event."""

    @property
    def provenance(self) -> tuple[Provenance, ...]:
        """Where each token came from: computed when it is read, since few callers read it."""
        return () if self.judged is None else self.judged.provenance()


@dataclass(slots=True)
class Live:
    """A sequence in the engine, with its text and figures."""

    seq: Sequence
    text: TextStream
    stats: Stats


@dataclass(slots=True)
class Outcome:
    """What a round added to one sequence, committed and not yet an event."""

    live: Live
    draft: Draft = EMPTY
    verdict: Verdict | None = None
    """None where nothing was decided: an error, or a cancelled text."""
    kept: tuple[Token, ...] = ()
    """The verdict's tokens up to where the text ends."""
    pieces: tuple[str, ...] = ()
    """The text of each kept token where stop strings had to be looked for; else empty, since not decoded yet."""
    logprobs: tuple[TokenLogprob, ...] = ()
    error: RequestError | None = None


def describe(outcome: Outcome) -> Event:
    """The event of an outcome: its tokens as text, where they came from, and the figures counted."""
    live, verdict, kept = outcome.live, outcome.verdict, outcome.kept
    seq = live.seq
    if verdict is None:
        event = Event(seq.id, text=live.text.flush(), finish=seq.finish)
        if outcome.error is None:
            return event
        fault = "model" if isinstance(outcome.error, ModelError) else "request"
        return event._replace(error=str(outcome.error), at_fault=fault)
    if len(kept) < len(verdict.tokens):
        verdict = Verdict(kept, verdict.path[: len(kept)])
    if outcome.pieces:
        pieces, text = outcome.pieces, "".join(outcome.pieces)
    else:
        pieces, text = detokenize(seq, kept, live.text)
    draft = outcome.draft
    if seq.finish == "length" and draft.parents is None and len(draft.tokens) > len(kept):
        draft = draft.first_nodes(len(kept))  # a draft behind a round in flight may pass its text's end
    judged = JudgedDraft.of(draft, verdict, seq.round - 1)
    live.stats.count(judged)
    if draft.probs is not None:
        judged = judged._replace(probs=_stated(draft.probs, verdict))
    told = (seq.id, kept, pieces, text, outcome.logprobs, judged, seq.finish, seq.stop_reason, "", "", None)
    return _new(Event, told)


def extend(seq: Sequence, tokens: tuple[Token, ...], stream: TextStream) -> tuple[int, tuple[str, ...]]:
    """Append tokens up to the first stop, the constraint's end or the length limit: the one place that decides.

    Returns how many are kept and, where stop strings must be looked for, the text each makes
    ready to show; elsewhere `detokenize` does that when there is time. A stop token is kept and not
    shown; a stop string is neither shown nor followed by any token.
    """
    params, text, count = seq.params, seq.tokens, len(tokens)
    looks = params.stop or seq.constraint is not None or (params.min_tokens and seq.generated < params.min_tokens)
    if not looks and count < seq.limit - len(text) and seq.stop_ids.isdisjoint(tokens):  # as nearly always
        text.extend(tokens)
        return count, ()
    return _extend_by_token(seq, tokens, stream)


def _extend_by_token(seq: Sequence, tokens: tuple[Token, ...], stream: TextStream) -> tuple[int, tuple[str, ...]]:
    """As `extend`, looking at each token."""
    kept, pieces, watch = 0, list[str](), bool(seq.params.stop)
    for token in tokens:
        seq.tokens.append(token)
        kept += 1
        may_stop = seq.generated >= seq.params.min_tokens
        if may_stop and token in seq.stop_ids:
            seq.finish, seq.stop_reason = "stop", token
            break
        if watch:
            pieces.append(stream.push(token, may_stop=may_stop))
            if stream.stopped is not None:
                seq.finish, seq.stop_reason = "stop", stream.stopped
                return kept, tuple(pieces)
        if seq.room <= 0:
            seq.finish = "length"
            break
    if seq.constraint is not None and seq.stop_reason is None:
        seq.constraint.advance(tokens[:kept])
        if seq.constraint.done:  # only the last token can get there: nothing is allowed behind it
            seq.finish = "stop"
    if watch and seq.finish is not None:
        pieces += [""] * (kept - len(pieces))
        pieces[-1] += stream.flush()
        if stream.stopped is not None:  # a stop string that only the end of the text could complete
            seq.finish, seq.stop_reason = "stop", stream.stopped
    return kept, tuple(pieces)


def detokenize(seq: Sequence, kept: tuple[Token, ...], stream: TextStream) -> tuple[tuple[str, ...], str]:
    """The text each token of a round makes ready to show, and all of it, for a sequence without stop strings."""
    if seq.finish is None:
        return stream.push_all(kept)
    shown = kept[:-1] if seq.stop_reason is not None else kept  # the last is a stop token
    spelled, text = stream.push_all(shown)
    pieces, rest = [*spelled, *[""] * (len(kept) - len(shown))], stream.flush()
    pieces[-1] += rest
    return tuple(pieces), text + rest


def _stated(probs: Tensor, verdict: Verdict) -> tuple[float, ...]:
    """The drafter's own probability of each accepted token, of probs [nodes, vocab]."""
    nodes = list(verdict.path)
    tokens = torch.tensor(verdict.tokens[: len(nodes)], dtype=torch.int64, device=probs.device)
    return tuple(probs[nodes].gather(-1, tokens[:, None])[:, 0].tolist())


def logprobs_of(top: int, verdict: Verdict, kept: tuple[Token, ...], logits: Tensor) -> tuple[TokenLogprob, ...]:
    """The target's log-probabilities of the kept tokens; logits [1 + draft, vocab] are its raw scores."""
    rows = [0, *(node + 1 for node in verdict.path)][: len(kept)]
    return tuple(token_logprobs(logits[rows], list(kept), top))
