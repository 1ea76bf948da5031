"""What a round costs where the host prepares one round while the device works on another."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.control.costs import MAX_RATIO, NEVER, PassTable, RoundCosts, RoundKind, RunningMean, size_of

_PLAIN_ROUNDS, _DRAFTED_ROUNDS, _START_ROUNDS = 32, 16, 6
"""Corrections are running means of about so many rounds without drafts, and with: those are fewer. What was timed at
the start counts as so many."""
_MAX_STEP = 1.5
"""A round that is slower than was expected by more than this, or faster, counts as by this: stalls say nothing, and a
drafter that seems too dear is not asked again soon."""
_DEVICE_SHARE = 1.25
"""A round that takes more of its passes than this waits for the host. Between two passes the device waits for launches
and copies, a tenth of a short pass: were that the host's part, shorter passes would seem as dear as long ones."""


class OverlappedCosts(RoundCosts):
    """A round takes as long as its passes, or as the host's work for it: whichever is longer.

    The host's part grows with the sequences, not with the width. It is known from rounds that took longer than their
    passes, of the same drafters and size of batch; it is no more than what any of them took.
    """

    def __init__(self, target: PassTable, drafters: Mapping[str, PassTable] | None = None) -> None:
        super().__init__(target, drafters)
        self._host: dict[tuple[str, ...], dict[int, RunningMean]] = {}
        """By drafters and `size_of` the batch: seconds of rounds that wait for the host. (): of those without drafts,
        whatever they wait for."""
        self._last: tuple[RoundKind, float, RunningMean, RunningMean] | None = None
        """The kind of the last round with drafts, seconds of its passes, what is known of the host's part and of the
        kind itself: the next is most often one more of it."""

    def shared_seconds(self, kind: RoundKind) -> float:
        return max(self._measured(kind), self.host_seconds(kind.drafters, kind.batch))

    def host_seconds(self, drafters: tuple[str, ...], batch: int) -> float:
        """What the host's part takes; of drafters that never were asked together, that of each beyond none."""
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
        for smaller in (known[each] for each in known if each < size):  # it was disturbed if it took longer
            smaller.value, smaller.start = min(smaller.value, seconds), min(smaller.start, seconds)

    def observe(self, kind: RoundKind, seconds: float, rounds: int = 1) -> None:
        if seconds <= 0:
            return
        if self._last is not None and kind is self._last[0]:
            self._now += rounds
            self._observe_asked(seconds, *self._last[1:], rounds)
            return
        passes = self._measured(kind)
        if passes <= 0:
            return
        self._now += rounds
        known, size = self._host.setdefault(kind.drafters, {}), size_of(kind.batch)
        host = known.get(size)
        if host is None:
            first = _within(seconds, passes, MAX_RATIO)
            host = known[size] = RunningMean(first, 0, self._now, first, _recent(kind))
        if kind.plain:
            host.value = host.at(self._now)
            host.add(_within(seconds, max(passes, host.value), _MAX_STEP), self._now, rounds)
            host.start = host.value
            return
        own = self._kinds.setdefault(kind, RunningMean(1.0, last=self._now, start=1.0, recent=_DRAFTED_ROUNDS))
        self._last = kind, passes, host, own
        self._observe_asked(seconds, passes, host, own, rounds)
        self._drop_oldest_kind()

    def _observe_asked(self, seconds: float, passes: float, host: RunningMean, own: RunningMean, rounds: int) -> None:
        """Note rounds with drafts. passes: what the passes of each were measured to take."""
        host.value, own.value = host.at(self._now), own.at(self._now)
        seconds = _within(seconds, own.value * max(passes, host.value), _MAX_STEP)
        if seconds > _DEVICE_SHARE * passes or seconds < host.value:
            host.add(seconds, self._now, rounds)
            host.start = min(host.start, host.value)  # rounds at the start were slower than they had to be
        else:  # it tells of its passes, longer contexts among the reasons
            host.last, host.count = self._now, host.count + rounds  # which is no more than was known
            own.add(seconds / max(passes, host.value), self._now, rounds)


def _recent(kind: RoundKind) -> int:
    return _PLAIN_ROUNDS if kind.plain else _DRAFTED_ROUNDS


def _within(told: float, expected: float, ratio: float) -> float:
    """What was told, as no more than so many times what was expected, and no less than that part of it."""
    return min(max(told, expected / ratio), expected * ratio)
