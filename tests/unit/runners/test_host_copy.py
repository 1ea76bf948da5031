"""Copies from a device whose memory on the host is used again: each tells what it was made of, and no other."""

from __future__ import annotations

import pytest
import torch

from outrider.core import host_copy
from outrider.core.host_copy import HostCopy


class DeviceTensor(torch.Tensor):
    """On the CPU, but taken for one on a device."""

    is_cuda = True


class Arrival:
    """An event that comes once it is waited for."""

    def __init__(self) -> None:
        self.done = False

    def record(self, stream: object) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


STREAM = {0: 0}
"""The current one."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The buffers that were made."""
    buffers: list[torch.Tensor] = []

    def new(tokens: torch.Tensor, free: list[host_copy._Buffer]) -> host_copy._Buffer:
        buffers.append(torch.zeros(tokens.shape, dtype=tokens.dtype))
        return host_copy._Buffer(buffers[-1], buffers[-1].numpy(), Arrival(), None, free)  # type: ignore[arg-type]

    monkeypatch.setattr(host_copy, "_new_buffer", new)
    monkeypatch.setattr(host_copy, "_current_stream", lambda device: STREAM[0])
    monkeypatch.setattr(host_copy, "_free", {})
    return buffers


def device(*values: int) -> torch.Tensor:
    return torch.tensor(values).as_subclass(DeviceTensor)


def test_memory_is_used_again_once_a_copy_is_read(made: list[torch.Tensor]):
    for i in range(20):
        source = device(i, i + 1)
        copies = [HostCopy(source), HostCopy(device(7 * i, 5))]
        source.fill_(-1)  # written again on the device
        assert [copy.list() for copy in copies] == [[i, i + 1], [7 * i, 5]]
        assert copies[0].array().tolist() == copies[0].list()
    assert len(made) == 2


def test_a_copy_that_was_read_does_not_change_with_the_next(made: list[torch.Tensor]):
    first = HostCopy(device(1, 2))
    kept = first.array()
    assert HostCopy(device(3, 4)).list() == [3, 4]
    assert kept.tolist() == first.list() == [1, 2]
    assert len(made) == 1


def test_only_memory_of_the_same_shape_and_kind_is_used_again(made: list[torch.Tensor]):
    for values in (torch.tensor([[1, 2]]), torch.tensor([1, 2]), torch.tensor([1.5, 2.5]), torch.tensor([3, 4, 5])):
        assert HostCopy(values.as_subclass(DeviceTensor)).list() == values.tolist()
    assert len(made) == 4


def test_memory_is_not_used_again_in_another_stream(made: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch):
    for stream in (0, 1, 0, 1):
        monkeypatch.setitem(STREAM, 0, stream)
        assert HostCopy(device(stream, 5)).list() == [stream, 5]
    assert len(made) == 2


def test_what_nobody_read_is_not_handed_out(made: list[torch.Tensor]):
    unread = HostCopy(device(1, 2))
    assert HostCopy(device(3, 4)).list() == [3, 4]
    assert unread.list() == [1, 2]
    assert len(made) == 2
