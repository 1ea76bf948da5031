"""What deciding costs the host: time with nothing to do does not count, nor time that it would have waited."""

from __future__ import annotations

import time

_OPEN_SHARE = 0.25
"""The share of work done while the device is busy that counts even so: some of it takes time on the device, too, and
the next launch comes later."""
_RECENT_ROUNDS = 4
"""The wait for a round, and what it takes to launch one, are running means over about this many rounds."""


class HostTime:
    """A clock that stands still while there is nothing to do."""

    def __init__(self) -> None:
        self._idle = 0.0
        """Seconds in which there was nothing to do."""
        self._stopped: float | None = None
        self._waited = self._launching = 0.0
        """Running means: the seconds that the host waits for a round, and takes to launch one that is not repeated."""
        self.hidden = False
        """The device works on a round while the host works."""

    def now(self) -> float:
        """The clock's seconds. It goes on if it was stopped."""
        now = time.perf_counter()
        if self._stopped is not None:
            self._idle += now - self._stopped
            self._stopped = None
        return now - self._idle

    def stop(self) -> None:
        """Stop the clock: there is nothing to do."""
        if self._stopped is None:
            self._stopped = time.perf_counter()

    def note_wait(self, seconds: float) -> None:
        """Note how long the host waited for a round to complete."""
        self._waited += (seconds - self._waited) / _RECENT_ROUNDS

    def note_launch(self, seconds: float) -> None:
        """Note how long it took to launch a round that was not repeated."""
        self._launching += (seconds - self._launching) / _RECENT_ROUNDS

    @property
    def launching(self) -> float:
        """Seconds by which the next round is delayed if it is launched anew and not repeated."""
        return self._delay(self._launching)

    def charge(self, began: float) -> float:
        """Seconds by which work that began at this time, and ends now, delays rounds."""
        return self._delay(self.now() - began)

    def _delay(self, took: float) -> float:
        return max(took - self._waited, _OPEN_SHARE * took) if self.hidden else took


class Allowance:
    """Limits some work to a share of the time."""

    def __init__(self, host: HostTime) -> None:
        self._host, self._next = host, 0.0

    @property
    def due(self) -> bool:
        return self._host.now() >= self._next

    def spend(self, began: float, share: float) -> None:
        """Note work that began at this time and ends now; the next is due once it amounts to this share of the time."""
        self._next = self._host.now() + rest_after(self._host.charge(began), share)


def rest_after(seconds: float, share: float) -> float:
    """The seconds to rest after work of `seconds`, so that the work takes this share of the time."""
    return seconds / share - seconds
