"""The examples run unchanged, on a tiny model, and what they print is what the engine says."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "server"))

from process_world import (  # noqa: E402 - found by the line above  # pyright: ignore[reportMissingImports]
    ENVIRONMENT,
    Process,
    process,
    write_tiny_model,
)

from outrider import LLM, SamplingParams  # noqa: E402
from outrider.checkpoints.demo import demo_folder  # noqa: E402

sys.path.append(str(ROOT / "examples"))
from chat import SAMPLE  # noqa: E402 - found by the line above  # pyright: ignore[reportMissingImports]

needs_demo = pytest.mark.skipif(demo_folder() is None, reason="the demo model is not here: outrider pull demo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), context=8192)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Process]:
    with process(folder, "--cache-tokens", "32768") as made:
        yield made


@pytest.fixture(scope="module")
def offline(folder: Path) -> LLM:
    return LLM(str(folder), drafter="none")


def run(script: str, *words: str, stdin: str = "") -> str:
    command = [sys.executable, str(ROOT / "examples" / script), *words]
    env = os.environ | ENVIRONMENT
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def at(server: Process) -> tuple[str, ...]:
    return "--base-url", f"{server.url}/v1", "--model", "tiny"


@pytest.mark.parametrize(
    ("script", "words", "says"),
    [
        ("chat.py", [], "no server at http://127.0.0.1:9/v1/chat/completions; start one: outrider serve demo"),
        ("code_completion.py", [], "no server at http://127.0.0.1:9/v1/completions; start one: outrider serve demo"),
        ("game_dialogue.py", [], "no server at http://127.0.0.1:9/v1/chat/completions; start one: outrider serve demo"),
        ("code_completion.py", ["--file", "no-such-file"], "No such file or directory: 'no-such-file'; --file is a"),
        ("batch_documents.py", ["--documents", "no-such-file"], "No such file or directory: 'no-such-file'"),
        ("batch_documents.py", ["--model", "demooo"], "there is no file or folder 'demooo'"),
    ],
)
def test_what_is_missing_is_said_in_one_line(script: str, words: list[str], says: str):
    words = words if script == "batch_documents.py" else ["--base-url", "http://127.0.0.1:9/v1", *words]
    command, env = [sys.executable, str(ROOT / "examples" / script), *words], os.environ | ENVIRONMENT
    done = subprocess.run(command, input="hi\n", capture_output=True, text=True, check=False, timeout=120, env=env)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("sample", [False, True])
def test_chat_remembers_what_was_said(server: Process, offline: LLM, sample: bool):
    words = (*at(server), "--seed", "5", "--max-tokens", "30", "--temperature", "0.8")
    questions = SAMPLE if sample else ("who goes there", "and you")
    said = run("chat.py", *words, *(["--sample"] if sample else []), stdin="" if sample else "\n".join(questions))
    messages = [{"role": "system", "content": "You are a helpful assistant."}]
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=30)
    for question in questions:
        messages.append({"role": "user", "content": question})
        result = offline.chat(messages, params)
        assert f"{result.text}\n[{len(result.tokens)} tokens in " in said
        messages.append({"role": "assistant", "content": result.text})
    assert said.count(" passes, the same text; ") == len(questions)
    assert "without drafts" not in run("chat.py", *words, "--once", stdin="hello\n")


def test_code_completion_counts_what_the_prediction_brought(folder: Path, offline: LLM, tmp_path: Path):
    """The file is like what this model will write, and nobody else drafts: there is something to accept."""
    file, fence = tmp_path / "code.py", "```"
    task = f"{fence}\n\nTask: tidy up.\nThe edited file:\n{fence}python\n"
    params = SamplingParams(max_tokens=60, stop=(fence,))
    code = "x = 1\n"
    for _ in range(3):  # the prompt holds the file, so the answer moves with it; its words stay alike
        code = offline.generate(f"A file:\n{fence}python\n{code}{task}", params).text + "\n"
    file.write_text(code)
    wanted = offline.generate(f"A file:\n{fence}python\n{code}{task}", params).text
    words = ("--file", str(file), "--instruction", "tidy up", "--max-tokens", "60")
    with process(folder, "--drafter", "prediction") as server:
        said = run("code_completion.py", *at(server), *words)
    assert said.startswith(wanted)
    assert "identical: yes" in said
    figures = re.search(r"prediction: (\d+) tokens accepted, (\d+) rejected, (\d+) written", said)
    passes = re.search(r"passes: (\d+) without it, (\d+) with it", said)
    assert figures
    assert passes
    accepted, _, written = map(int, figures.groups())
    assert accepted > 0
    assert int(passes[1]) >= written == 60  # one token a pass, and those that read the prompt
    assert int(passes[2]) <= int(passes[1]) - accepted


def test_batch_documents_reads_the_examples_once(folder: Path, tmp_path: Path):
    """The texts are the offline engine's, without drafts; the beginning that all prompts share is read once."""
    documents = tmp_path / "documents.txt"
    documents.write_text("Choir on Sunday.\nBaking on Monday.\nChess on Friday.\n")
    said = run("batch_documents.py", "--model", str(folder), "--documents", str(documents), "--max-tokens", "40")
    assert [line for line in said.splitlines() if line.endswith(".")] == documents.read_text().splitlines()
    answers = [line.strip() for line in said.splitlines() if line.startswith("    {")]
    assert len(answers) == 3
    assert all(each.startswith('{"name_of_course": "') for each in answers)
    assert "identical: yes" in said
    prompts = re.search(r"prompts: (\d+) tokens, (\d+) of them found in the cache", said)
    passes = re.search(r"passes: (\d+) without drafts, (\d+) with them", said)
    assert prompts
    assert passes
    assert int(prompts[2]) > 0.5 * int(prompts[1])  # all but the ends of the second and the third
    assert int(passes[2]) < int(passes[1]) - 3 * 5  # the first name of a field alone is forced


def test_game_dialogue_can_be_played_again(server: Process):
    words = (*at(server), "--deadline", "60", "--max-tokens", "800")
    games = [run("game_dialogue.py", *words, "--seed", seed) for seed in ("7", "7", "8")]
    spoken = [[line for line in game.splitlines() if not line.startswith("[")] for game in games]
    assert spoken[0] == spoken[1] != spoken[2]
    said = re.compile(r"^(Mira|Tam|Odo) \((friendly|wary|afraid), (nods|points|steps back|shrugs)\): ", re.MULTILINE)
    assert len(said.findall(games[0])) == 9
    assert games[0].count(", 0 had nothing to say in time]") == 3
    assert games[0].count(" s, the same replies]") == 3


def test_game_dialogue_goes_on_without_those_who_are_late(server: Process):
    said = run("game_dialogue.py", *at(server), "--deadline", "0.001")
    assert said.count(", 3 had nothing to say in time]") == 3
    assert said.count("(wary, shrugs): ...") == 9


@needs_demo
@pytest.mark.parametrize(("added", "tau"), [((), 2), (("--fixed",), 4)], ids=["where it pays", "always"])
def test_make_demo_edits_the_text_and_gains(added, tau):
    """The command of the Makefile: the date is changed, the rest is kept, and a pass yields several tokens.

    How many where drafts must pay depends on what rows cost on this machine.
    """
    dry = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in dry.splitlines() if "outrider run" in line]
    command = [sys.executable, "-m", "outrider", *shlex.split(line)[1:], *added, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    prompt = (ROOT / "examples" / "edit_prompt.txt").read_text()
    kept = re.search(r" at nine .*notes after the workshop\.", prompt)
    assert kept
    assert result["text"].strip() == f", 13 May,{kept[0]}"
    assert result["identical"]
    assert result["stats"]["tau"] > tau
