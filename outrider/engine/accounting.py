"""What a completed round tells: drafters how drafts fared, the controller what it took, requests their figures."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from outrider.engine.drafting import Drafting
from outrider.engine.events import Live, Outcome
from outrider.engine.round import InFlightRound
from outrider.engine.stats import Times


def observe(drafting: Drafting, done: InFlightRound, outcomes: Seq[Outcome]) -> None:
    """Show drafters what became of a round, but for those that joined it and have no draft: nobody was asked."""
    if not done.proposal.members:
        return
    new = {each.seq.id for each, draft in zip(done.scheduled, done.drafts, strict=True) if each.joined and not draft}
    seen = [(o.live.seq, o.draft, o.verdict) for o in outcomes if o.verdict is not None and o.live.seq.id not in new]
    if seen:
        drafters = done.drafters_of([seq.id for seq, _, _ in seen])
        seqs, drafts, verdicts = [s for s, _, _ in seen], [d for _, d, _ in seen], [v for _, _, v in seen]
        drafting.observe(seqs, drafts, verdicts, drafters, done.proposal.members)


def tell_controller(
    drafting: Drafting, done: InFlightRound, outcomes: Seq[Outcome], behind: InFlightRound | None
) -> None:
    """Tell the controller what came of a round, and what it took where it only decoded. behind: the round behind it."""
    if drafting.controller is None:
        return
    decodes = done.repeated or all(each.decodes and not each.joined for each in done.scheduled)
    if decodes and not done.proposal.members:  # nobody was asked, and nothing is done for each sequence
        rested = [o.live.seq.id for o in outcomes if o.verdict is not None]
        drafting.account_rest(done.proposal, rested, done.times.total, steady=done.is_steady(behind))
        return
    ids = [each.seq.id for each in done.scheduled]
    verdicts = {o.live.seq.id: o.verdict for o in outcomes if o.verdict is not None}
    seconds = done.times.total if decodes else 0.0
    drafting.account(done.proposal, verdicts, ids, seconds, steady=done.is_steady(behind))


def count_round(done: InFlightRound, live: Mapping[int, Live]) -> None:
    """Count a round in the figures of its sequences that are live."""
    times = done.times
    rows = sum(draft.scored for draft in done.drafts) + len(done.scheduled)
    for each in done.scheduled:
        if each.seq.id in live:
            stats = live[each.seq.id].stats
            stats.shared_tokens += 0 if stats.passes else each.shared  # not what is found again after a preemption
            stats.passes += 2 if each.joined and each.seq.prompt_len > 1 + each.shared else 1
            stats.rows += rows if each.decodes and not each.joined else 0
            stats.times.add(Times(read=times.total) if each.joined or not each.decodes else times)
