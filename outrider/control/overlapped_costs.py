"""What a round costs where the host prepares one round while the device works on another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from outrider.control.costs import MAX_RATIO, NEVER, PassTable, RoundCosts, RoundKind, RunningMean, size_of, within

_PLAIN_ROUNDS, _DRAFTED_ROUNDS, _START_ROUNDS = 32, 16, 6
"""Corrections are running means of about this many rounds without drafts, and with drafts, which are fewer. What was
timed at start-up counts as the third number of rounds."""
_KIND_ROUNDS = 64
"""The same for one kind of round, which changes slowly: a change is first taken to hold for all widths."""
_MAX_STEP = 1.5
"""Times are limited to within this factor of the expected time: a stall says nothing, and a drafter that seems too
expensive is not asked again soon."""
_DEVICE_SHARE = 1.25
"""A round that takes more than this many times its passes waits for the host. Between passes the device also waits for
launches and copies, a tenth of a short pass: as the host's part, these would make short passes seem as slow as long."""


class _Known(NamedTuple):
    """What is known of rounds of a kind with drafts."""

    kind: RoundKind
    passes: float
    """Seconds of its passes, as they were measured."""
    host: RunningMean
    pace: RunningMean
    own: RunningMean
    """The host's seconds, the ratio of its drafters' passes to their measured times, and a further one of this kind."""


class OverlappedCosts(RoundCosts):
    """A round takes as long as its passes, or as the host's work for it: whichever is longer.

    The host's part grows with the sequences, not with the width. It is known from rounds that took longer than their
    passes, of the same drafters and size of batch; a round that took less lowers it. Passes take longer than they were
    measured to where contexts are long or tokens are sampled: what is seen of one width holds for all.
    """

    def __init__(self, target: PassTable, drafters: Mapping[str, PassTable] | None = None) -> None:
        super().__init__(target, drafters)
        self._host: dict[tuple[str, ...], dict[int, RunningMean]] = {}
        """By drafters and `size_of` the batch: seconds of rounds that wait for the host. (): of rounds without drafts,
        whatever they wait for."""
        self._paces: dict[tuple[tuple[str, ...], int], RunningMean] = {}
        """By drafters and `size_of` the batch: the ratio of their passes to the measured times."""
        self._last: _Known | None = None
        """What is known of the kind of the last round with drafts: the next one is most often of the same kind."""

    def shared_seconds(self, kind: RoundKind) -> float:
        pace, passes = self._paces.get((kind.drafters, size_of(kind.batch))), self._measured(kind)
        device = passes if pace is None else passes * pace.at(self._now)
        return max(device, self.host_seconds(kind.drafters, kind.batch))

    def host_seconds(self, drafters: tuple[str, ...], batch: int) -> float:
        """The host's seconds of a round. Drafters never asked together: those of no drafter, and what each one adds."""
        known = self._host.get(drafters)
        if known:
            size = size_of(batch)
            return (known.get(size) or known[min(known, key=lambda each: abs(each - size))]).at(self._now)
        if not drafters:
            return 0.0
        plain = self.host_seconds((), batch)
        each = (self.host_seconds((name,), batch) for name in drafters) if len(drafters) > 1 else ()
        return plain + sum(max(0.0, seconds - plain) for seconds in each)

    def asking_seconds(self, drafters: tuple[str, ...], batch: int) -> float:
        plain = self.seconds(RoundKind(batch, 1, batch))
        return max(0.0, self.host_seconds(drafters, batch) - plain)

    def knows_asking(self, kind: RoundKind) -> bool:
        known = self._host.get(kind.drafters, {}).get(size_of(kind.batch))
        return known is not None and known.last != NEVER

    def borrows_level(self, batch: int) -> bool:
        known = self._host.get(())
        return bool(known) and size_of(batch) not in known

    def start_with(self, kind: RoundKind, seconds: float) -> None:
        self._last = None
        known, size = self._host.setdefault(kind.drafters, {}), size_of(kind.batch)
        known[size] = RunningMean(seconds, _START_ROUNDS, NEVER, seconds, _recent(kind))
        for smaller in (known[each] for each in known if each < size):  # one that took longer was disturbed
            smaller.value, smaller.start = min(smaller.value, seconds), min(smaller.start, seconds)

    def observe(self, kind: RoundKind, seconds: float, rounds: int = 1) -> None:
        if seconds <= 0:
            return
        if self._last is not None and kind is self._last.kind:
            self._now += rounds
            self._observe_asked(seconds, self._last, rounds)
            return
        passes = self._measured(kind)
        if passes <= 0:
            return
        self._now += rounds
        known, size = self._host.setdefault(kind.drafters, {}), size_of(kind.batch)
        host = known.get(size)
        if host is None:
            first = within(seconds, passes, MAX_RATIO)
            host = known[size] = RunningMean(first, 0, self._now, first, _recent(kind))
        if kind.plain:
            host.value = host.at(self._now)
            host.add(within(seconds, max(passes, host.value), _MAX_STEP), self._now, rounds)
            host.start = host.value
            return
        pace = self._paces.setdefault((kind.drafters, size), self._even(_DRAFTED_ROUNDS, _START_ROUNDS))
        own = self._kinds.setdefault(kind, self._even(_KIND_ROUNDS, _KIND_ROUNDS))
        self._last = _Known(kind, passes, host, pace, own)
        self._observe_asked(seconds, self._last, rounds)
        self._drop_oldest_kind()

    def _even(self, recent: int, count: int) -> RunningMean:
        """A ratio that begins at 1, as was measured. count: the number of rounds that this prior counts as."""
        return RunningMean(1.0, count, self._now, 1.0, recent)

    def _observe_asked(self, seconds: float, known: _Known, rounds: int) -> None:
        """Note rounds with drafts."""
        _, passes, host, pace, own = known
        for each in (host, pace, own):
            each.value = each.at(self._now)
        seconds = within(seconds, own.value * max(passes * pace.value, host.value), _MAX_STEP)
        if seconds > _DEVICE_SHARE * passes or seconds < host.value:
            host.add(seconds, self._now, rounds)
            host.start = min(host.start, host.value)  # rounds at the start were slower than they had to be
            return
        # the device was busy all the time: its passes may take longer for long contexts or sampled tokens
        host.last, host.count = self._now, host.count + rounds  # the host took no more than was known
        pace.add(seconds / own.value / passes, self._now, rounds)
        own.add(seconds / max(passes * pace.value, host.value), self._now, rounds)  # what others do not explain


def _recent(kind: RoundKind) -> int:
    return _PLAIN_ROUNDS if kind.plain else _DRAFTED_ROUNDS
