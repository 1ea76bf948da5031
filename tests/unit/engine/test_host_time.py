"""What deciding costs the host."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outrider.engine import host_time
from outrider.engine.host_time import Allowance, HostTime


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(host_time, "time", SimpleNamespace(perf_counter=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_time_with_nothing_to_do_does_not_count(clock: Clock):
    host = HostTime()
    began = host.now()
    clock.now += 1
    for _ in range(2):  # the first time counts
        host.stop()
        clock.now += 50
    assert host.now() - began == 1.0
    clock.now += 1
    assert host.now() - began == 2.0


@pytest.mark.parametrize(("took", "charged"), [(1.0, 0.25), (4.0, 1.0), (12.0, 9.0)])
def test_what_the_host_would_have_waited_counts_for_little(took: float, charged: float, clock: Clock):
    """It waits three seconds a round; a quarter always counts, and all of it where the device has nothing to do."""
    host = HostTime()
    for _ in range(100):
        host.note_wait(3.0)
    for host.hidden, expected in ((True, charged), (False, took)):
        began = host.now()
        clock.now += took
        assert host.charge(began) == pytest.approx(expected)


def test_a_share_is_of_the_time_with_something_to_do(clock: Clock):
    host = HostTime()
    allowance = Allowance(host)
    assert allowance.due
    began = host.now()
    clock.now += 1
    allowance.spend(began, 0.1)
    host.stop()
    clock.now += 1000
    for _ in range(9):
        assert not allowance.due
        clock.now += 1
    assert allowance.due


def test_a_launch_delays_the_next_round_as_far_as_the_host_has_no_time_for_it(clock: Clock):
    host = HostTime()
    for _ in range(100):
        host.note_launch(4.0)
        host.note_wait(3.0)
    for host.hidden, delay in ((True, 1.0), (False, 4.0)):
        assert host.launching == pytest.approx(delay)
