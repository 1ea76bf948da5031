"""Reports a completed round: verdicts to the drafters, tokens and seconds to the controller, figures to requests."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from outrider.core.draft import EMPTY
from outrider.engine.drafting import Drafting
from outrider.engine.events import Live, Outcome
from outrider.engine.round import InFlightRound
from outrider.engine.scheduler import ScheduledSequence
from outrider.engine.stats import Stats, Times


def observe(drafting: Drafting, done: InFlightRound, outcomes: Seq[Outcome]) -> None:
    """Show drafters what became of a round, without sequences that joined it and were not drafted for."""
    if not done.proposal.members:
        return
    if not done.repeated:  # nobody joins one
        pairs = zip(done.scheduled, done.drafts, strict=True)
        new = {each.seq.id for each, draft in pairs if each.joined and not draft}
        outcomes = [o for o in outcomes if o.live.seq.id not in new]
    seen = [(o.live.seq, o.draft, o.verdict) for o in outcomes if o.verdict is not None]
    if seen:
        seqs, drafts, verdicts = zip(*seen, strict=True)
        drafters = done.drafters_of([seq.id for seq in seqs])
        drafting.observe(seqs, drafts, verdicts, drafters, done.proposal.members)


def tell_controller(
    drafting: Drafting, done: InFlightRound, outcomes: Seq[Outcome], behind: InFlightRound | None
) -> None:
    """Tell the controller what came of a round, and its seconds if all sequences decoded. behind: the next round."""
    if drafting.controller is None:
        return
    decodes = done.repeated or all(each.decodes and not each.joined for each in done.scheduled)
    seconds, steady = done.times.total if decodes else 0.0, done.is_steady(behind)
    if not done.proposal.members:  # nobody was asked, and nothing is done for each sequence
        rested = [o.live.seq.id for o in outcomes if o.verdict is not None]
        drafting.account_rest(done.proposal, rested, seconds, steady=steady)
        return
    ids = [each.seq.id for each in done.scheduled]
    verdicts = {o.live.seq.id: o.verdict for o in outcomes if o.verdict is not None}
    drafting.account(done.proposal, verdicts, ids, seconds, steady=steady)


def count_round(done: InFlightRound, live: Mapping[int, Live]) -> None:
    """Count a round in the figures of each of its live sequences."""
    times, rows = done.times, len(done.scheduled) + sum([draft.scored for draft in done.drafts if draft is not EMPTY])
    repeated = done.repeated
    for each in done.scheduled:
        found = live.get(each.seq.id)
        if found is None:
            continue
        stats = found.stats
        if repeated or (stats.passes and each.decodes and not each.joined):  # as nearly always
            stats.passes += 1
            stats.rows += rows
            stats.times.add(times)
        else:
            _count_reading(each, stats, rows, times)


def _count_reading(each: ScheduledSequence, stats: Stats, rows: int, times: Times) -> None:
    """Count a round in which a sequence's prompt may have been read. rows, times: of the round."""
    reads = each.joined or not each.decodes
    stats.shared_tokens += 0 if stats.passes else each.shared  # not what is found again after a preemption
    stats.passes += 2 if each.joined and each.seq.prompt_len > 1 + each.shared else 1
    stats.rows += 0 if reads else rows
    stats.times.add(Times(read=times.total) if reads else times)
