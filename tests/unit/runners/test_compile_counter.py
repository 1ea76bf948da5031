"""Counting what is compiled after start-up, with a double in Triton's place."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from outrider.runners.compile_counter import MAX_NAMES, CompileCounter, LateWork, ReadyMark, watch_triton

CPU = torch.device("cpu")


def compiled(hook: object, name: str) -> object:
    """As Triton calls its hook."""
    return hook(  # pyright: ignore[reportCallIssue]
        key="k",
        repr=f"{name}[num_warps=4](x: *fp32)",
        fn=None,
        compile={"constants": {(3,): 64}},
        is_manual_warmup=False,
    )


def test_only_what_comes_after_start_up_counts():
    counter = CompileCounter()
    with counter.start_up():
        with counter.start_up():
            counter.note("a")
        counter.note("b")
    mark = ReadyMark(CPU, counter)
    assert mark.late_work == LateWork()
    counter.note("c")
    counter.note("d")
    assert mark.late_work == LateWork(2, 0, ("c", "d"))


def test_a_second_engine_counts_from_its_own_start_and_does_not_disturb_the_first():
    counter = CompileCounter()
    first = ReadyMark(CPU, counter)
    counter.note("a")
    with counter.start_up():
        counter.note("of the second's start")
    second = ReadyMark(CPU, counter)
    counter.note("b")
    assert first.late_work.names == ("a", "b")
    assert second.late_work.names == ("b",)


def test_an_error_during_start_up_ends_it():
    counter = CompileCounter()
    with pytest.raises(ValueError, match="no room"), counter.start_up():
        raise ValueError("no room")
    counter.note("a")
    assert counter.count == 1


def test_the_count_goes_on_where_names_are_dropped():
    counter = CompileCounter()
    mark = ReadyMark(CPU, counter)
    for i in range(MAX_NAMES + 9):
        counter.note(str(i))
    assert mark.late_work.compilations == MAX_NAMES + 9
    assert mark.late_work.names == tuple(str(i) for i in range(9, MAX_NAMES + 9))


def test_tritons_hook_counts_names_kernel_and_constants_and_calls_the_one_before(monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []
    runtime = SimpleNamespace(jit_post_compile_hook=lambda **given: told.append(given["repr"]) or "theirs")
    module = ModuleType("triton")
    module.knobs = SimpleNamespace(runtime=runtime)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "triton", module)
    counter = CompileCounter()
    watch_triton(counter)
    watch_triton(counter)  # once is enough
    assert compiled(runtime.jit_post_compile_hook, "_norm_row") == "theirs"
    assert told == ["_norm_row[num_warps=4](x: *fp32)"]
    assert counter.names(1) == ("_norm_row[num_warps=4](x: *fp32) with 64",)
    assert counter.count == 1
