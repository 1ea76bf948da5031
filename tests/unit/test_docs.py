"""The commands and code in the README and the docs run, and do what the text says."""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from outrider.checkpoints.demo import demo_folder
from outrider.cli.main import main
from outrider.core.sampling import SamplingParams
from outrider.drafters.base import DrafterContext
from outrider.drafters.none import NoDraft
from outrider.drafters.registry import DRAFTERS, parse_drafter
from outrider.engine.engine import Engine
from outrider.engine.request import Request
from outrider.llm import LLM
from outrider.loading.load import LoadOptions
from outrider.testing.toy import ByteTokenizer, ToyRunner
from outrider.verify.base import make_verifier

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PYTHON = (ROOT / "docs" / "python.md").read_text()
needs_demo = pytest.mark.skipif(demo_folder() is None, reason="the demo model is not here: outrider pull demo")


def blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)


def commands() -> list[str]:
    lines = [line for block in blocks(README, "console") for line in block.splitlines()]
    return [line.removeprefix("$ ").split("  #")[0].strip() for line in lines if line.startswith("$ ")]


@needs_demo
def test_the_readme_s_three_lines_of_python_run():
    (code,) = blocks(README, "python")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 5


@needs_demo
@pytest.mark.parametrize("command", [c for c in commands() if "Qwen" not in c and " serve " not in c])
def test_the_readme_s_commands_run(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    _, *args = shlex.split(command)
    monkeypatch.setattr(sys, "stdin", io.StringIO("/quit\n"))
    with pytest.raises(SystemExit) as left:
        main(args)
    said = "".join(capsys.readouterr())
    assert not left.value.code, said
    if "--compare" in args:
        assert re.search(r"identical\W+yes", said)


@needs_demo
def test_the_readme_s_server_starts_and_ends():
    (command,) = [c for c in commands() if " serve " in c]
    _, *args = shlex.split(command)
    with subprocess.Popen(
        [sys.executable, "-m", "outrider", *args, "--port", "0"], stderr=subprocess.PIPE, text=True
    ) as server:
        lines: list[str] = []
        for line in server.stderr or ():
            lines.append(line)
            if line.strip() == "ready":
                server.terminate()
        assert server.wait(60) == 0, lines
    assert any("ready" in line for line in lines)
    assert any("http://127.0.0.1:" in line for line in lines)


@needs_demo
def test_the_python_page_runs(capsys: pytest.CaptureFixture[str]):
    ends = (r"True \d\.\d+\n$", r"\S")
    for code, end in zip(blocks(PYTHON, "python"), ends, strict=True):
        exec(code, {"__name__": "__main__"})  # noqa: S102 - of our own page
        assert re.search(end, capsys.readouterr().out)


def test_the_python_page_lists_every_option_and_no_other():
    options, sampling = (re.findall(r"^\| `(\w+)`", part, re.MULTILINE) for part in PYTHON.split("## generate"))
    named = [p.name for p in inspect.signature(LLM).parameters.values() if p.kind == p.KEYWORD_ONLY]
    passed_on = {f.name for f in fields(LoadOptions)} - {"max_draft", "reserved"} - set(named)
    assert sorted(options) == sorted([*named, *passed_on])
    assert sampling == [f.name for f in fields(SamplingParams)]


def test_every_drafter_the_readme_lists_is_there_and_the_other_way_round():
    listed = re.findall(r"^\| `([a-z-]+)`", README, re.MULTILINE)
    assert sorted(listed) == sorted(DRAFTERS)
    (spec,) = {args[args.index("--drafter") + 1] for args in map(shlex.split, commands()) if "Qwen" in str(args)}
    assert type(parse_drafter(spec)).__name__ == "DraftModelConfig"


def test_every_file_the_docs_link_to_is_there():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_structure_page_lists_what_each_part_imports():
    """The same as the test of the structure enforces."""
    tree = ast.parse((ROOT / "tests" / "unit" / "test_structure.py").read_text())
    (knows,) = [ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.AnnAssign) and n.target.id == "KNOWS"]
    rows = re.findall(r"^\| `(\w+)` \|.*\|(.*)\|$", (ROOT / "docs" / "structure.md").read_text(), re.MULTILINE)
    assert [(part, set(re.findall(r"`(\w+)`", imports))) for part, imports in rows] == list(knows.items())


def test_the_drafter_of_the_docs_works_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (code,) = blocks((ROOT / "docs" / "add_a_drafter.md").read_text(), "python")
    (tmp_path / "echo_of_the_docs.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    echo = importlib.import_module("echo_of_the_docs").EchoConfig(k=4)
    target = ToyRunner()
    texts = []
    for drafter in (NoDraft(), echo.build(DrafterContext(vocab_size=target.vocab_size, context=target.context))):
        engine = Engine(ToyRunner(), drafter, make_verifier("seeded"), ByteTokenizer())
        params = SamplingParams(max_tokens=40, temperature=1, seed=5)
        (seq_id,) = engine.submit(Request(prompt=(1, 2, 3), params=params))
        texts.append([token for _ in range(60) for event in engine.step() for token in event.tokens])
        assert seq_id == 0
        engine.check()
    assert texts[0] == texts[1]
    assert len(texts[0]) == 40


def test_make_help_names_every_target():
    printed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("install", "demo", "test", "bench"):
        assert f"make {target}" in printed
