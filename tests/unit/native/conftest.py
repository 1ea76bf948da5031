"""The CPU kernels, one instruction set after another. Skipped where there is no compiler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider.native.library import Library, library

KERNELS = ("plain", "avx2", "avx512", "amx", "neon", "neon-dot")


@pytest.fixture
def native() -> Library:
    found = library()
    if found is None:
        pytest.skip("the CPU kernels are not here: no compiler, or OUTRIDER_NATIVE=0")
    return found


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest, native: Library) -> Iterator[Library]:
    """The library with each instruction set that this machine has."""
    before = native.kernels
    if not native.call("use_kernels", request.param.encode()):
        pytest.skip(f"this machine has no {request.param}")
    yield native
    native.call("use_kernels", before.encode())
