"""The target's pass of a round, and what the device decides behind it before the host knows anything of the round."""

from __future__ import annotations

from dataclasses import replace

from outrider.core.host_copy import HostCopy
from outrider.core.sequence import Span
from outrider.drafters.base import TargetPass
from outrider.engine.drafting import Drafting
from outrider.engine.logprobs import RoundLogprobs
from outrider.engine.round import InFlightRound
from outrider.engine.scheduler import ScheduledSequence
from outrider.runners.base import Runner, Scores
from outrider.runners.device_state import DeviceState
from outrider.verify.base import Verifier


class TargetPasses:
    """Launches passes of the target, and the choices that follow from them."""

    def __init__(self, target: Runner, drafting: Drafting) -> None:
        self.target, self.drafting = target, drafting

    def score(
        self, verifier: Verifier, scheduled: list[ScheduledSequence], spans: list[Span], state: DeviceState | None
    ) -> Scores:
        """The target's pass; with the target's choices where all sequences decode and the target alone decides."""
        if all(each.decodes for each in scheduled):
            draws = verifier.draws([each.seq for each in scheduled])
            if draws is not None:
                if self.drafting.reads_scores:
                    draws = replace(draws, logits=True)
                return self.target.score_and_choose(spans, state, draws)
        return self.target.score(spans, state)

    def decide(self, verifier: Verifier, launched: InFlightRound, spans: list[Span]) -> None:
        """Launch the choices of a round where the target alone decides, and the device state that follows from them."""
        seqs, drafts = launched.decoding
        scores = launched.scores
        if scores.choices is not None:
            launched.choices = HostCopy(scores.choices)
        elif seqs:
            launched.choices = verifier.decide(seqs, drafts, scores.logits, scores.positions)
        if launched.choices is not None and len(seqs) == len(spans):
            state = self.target.advance(scores, launched.choices.tokens)
            if state is not None:
                launched.state = state.with_drafted(tuple([len(draft.tokens) for draft in drafts]))
        if launched.choices is not None and any(seq.params.logprobs is not None for seq in seqs):
            launched.logprobs = RoundLogprobs(seqs, drafts, scores.logits, launched.choices.tokens)
        traits = self.drafting.traits
        if traits.follows_target and (launched.state is not None or not traits.taps):
            self.drafting.process(TargetPass([each.seq for each in launched.scheduled], spans, scores, launched.state))
            launched.processed = True
        elif scores.features is not None:  # read when the round completes; another pass may come before
            launched.scores = replace(scores, features=[each.clone() for each in scores.features])
