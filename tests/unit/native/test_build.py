"""Building the CPU kernels: once for each version of the sources; without a compiler it is said what would help."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.native import build
from outrider.native import library as library_module
from outrider.native.build import BuildError, find_compiler, find_or_build
from outrider.native.library import Library


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes what it was asked for, and notes its calls."""
    log, script = tmp_path / "calls", tmp_path / "cxx"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\n[ "$1" = --version ] && exec echo 1\n'
        'while [ "$1" != -o ]; do shift; done; echo made > "$2"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(build, "INSTALLED", tmp_path / "nothing")
    return log


def test_it_is_built_once_for_each_version_of_the_sources(
    fake_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "api.cpp").write_text("one")
    monkeypatch.setattr(build, "SOURCES", sources)
    first = find_or_build()
    compiled = fake_compiler.read_text().count(" -c ")
    assert first.read_text() == "made\n"
    assert (find_or_build(), fake_compiler.read_text().count(" -c ")) == (first, compiled)
    assert [path.name for path in first.parent.iterdir()] == [first.name], "nothing else is left"
    (sources / "api.cpp").write_text("two")
    assert find_or_build() != first


def test_an_installed_library_of_these_sources_is_taken(
    fake_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    installed = tmp_path / "liboutrider.so"
    monkeypatch.setattr(build, "INSTALLED", installed)
    build.install()
    assert find_or_build() == installed
    installed.with_suffix(".key").write_text("of other sources")
    assert find_or_build() != installed
    build.uninstall()
    assert not installed.exists()
    assert not installed.with_suffix(".key").exists()


@pytest.mark.parametrize(
    ("script", "why"), [("echo 'x.cpp:1: error: bad' >&2; exit 1", "error: bad"), ("exit 3", "exit status 3")]
)
def test_a_compiler_that_fails(script: str, why: str, fake_compiler: Path, tmp_path: Path):
    (tmp_path / "cxx").write_text(f"#!/bin/sh\n{script}\n")
    with pytest.raises(BuildError, match=why):
        find_or_build()


def test_a_compiler_older_than_amx_builds_the_rest(
    fake_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    script = tmp_path / "cxx"
    script.write_text(script.read_text().replace("\n", '\ncase "$*" in *-mamx*) exit 1;; esac\n', 1))
    assert find_or_build().read_text() == "made\n"
    assert fake_compiler.read_text().count("-DOUTRIDER_NO_AMX -c") == 1


@pytest.mark.parametrize(("machine", "file"), [("x86_64", "avx2"), ("aarch64", "neon"), ("riscv64", "")])
def test_only_what_the_machine_has_is_compiled(
    machine: str, file: str, fake_compiler: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    find_or_build()
    calls = fake_compiler.read_text()
    assert "kernels_plain.cpp" in calls
    assert [name for name in ("avx2", "neon") if f"kernels_{name}.cpp" in calls] == ([file] if file else [])


def test_where_the_system_refuses_tiles_avx512_is_used(native: Library, tmp_path: Path):
    if native.kernels != "amx":
        pytest.skip("this machine has no amx")
    shim, source = tmp_path / "refuse.so", tmp_path / "refuse.cpp"
    source.write_text('extern "C" long syscall(long, ...) { return -1; }')
    subprocess.run([*find_compiler(), "-shared", "-fPIC", str(source), "-o", str(shim)], check=True)
    script = f"from outrider.native.library import Library; print(Library({str(find_or_build())!r}).kernels)"
    told = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "avx512\n"


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="install one, for example g"):
        find_compiler()


def test_structures_are_as_large_as_the_librarys(native: Library):
    from ctypes import sizeof

    from outrider.native.library import BlockHead, Drafts, Layer, Model, Pass, Sequence, StepHead

    for index, structure in enumerate((Layer, Model, Sequence, Pass, BlockHead, StepHead, Drafts)):
        assert native.call("struct_bytes", index) == sizeof(structure), structure


@pytest.mark.parametrize(("asked", "used"), [("0", False), (None, False), ("1", True)])
def test_plain_kernels_are_used_only_where_they_are_asked_for(
    asked: str | None, used: bool, native: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.delenv("OUTRIDER_NATIVE", raising=False)
    if asked:
        monkeypatch.setenv("OUTRIDER_NATIVE", asked)
    monkeypatch.setattr(Library, "kernels", "plain")
    library_module._load.cache_clear()
    try:
        assert (library_module.library() is not None) == used
    finally:
        library_module._load.cache_clear()
    assert ("need AVX2 or NEON" in caplog.text) == (asked is None)
