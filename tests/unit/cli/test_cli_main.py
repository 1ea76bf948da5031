"""How the command line ends: exit codes, hints, and what it does not import."""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
import threading
from dataclasses import fields

import pytest

from outrider import __version__, llm
from outrider.cli.options import ModelOptions, SamplingOptions, flatten_options
from outrider.core.errors import LosslessError
from outrider.core.sampling import SamplingParams
from outrider.loading.load import LoadOptions


def test_version_and_help(cli):
    assert cli("--version").out == f"outrider {__version__}\n"
    bare, asked = cli(), cli("--help")
    assert bare.code == asked.code == 0
    for verb in ("run", "chat", "pull", "list", "drafters"):
        assert verb in asked.out
        assert cli(verb, "--help").code == 0
    assert bare.out == asked.out


def test_help_fits_a_screen(cli):
    assert cli("run", "--help").out.count("\n") < 70
    assert cli("chat", "--help").out.count("\n") < 60


def test_help_does_without_torch():
    code = (
        "import sys; from outrider.cli.main import main\n"
        "try: main(['run', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_python_m_outrider_and_a_reader_that_leaves():
    command = [sys.executable, "-m", "outrider", "run", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait() in (0, 1)
    assert said == b""


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["run", "a", "--draftr", "x"], "did you mean --drafter?"),
        (["run", "a", "--max-token", "3"], "did you mean --max-tokens?"),
        (["run", "a", "--draft-model", "org/small"], "did you mean --drafter draft-model:model=org/small?"),
        (["run", "a", "--draft-model=org/small"], "did you mean --drafter draft-model:model=org/small?"),
        (["run", "a", "-md", "small.gguf"], "did you mean --drafter draft-model:model=small.gguf?"),
        (["run", "a", "--speculative-model", "m"], "did you mean --drafter draft-model:model=m?"),
        (["run", "a", "--num-speculative-tokens", "5"], "did you mean --drafter NAME:k=5?"),
        (["run", "a", "--num-draft-tokens", "5"], "did you mean --drafter NAME:k=5?"),
        (["run", "a", "--spec-type", "ngram"], "did you mean --drafter ngram?"),
        (["run", "a", "--max-new-tokens", "9"], "did you mean --max-tokens 9?"),
        (["chat", "--temp", "0.5"], "did you mean --temperature 0.5?"),
        (["rnu"], "did you mean run?"),
        (["drafter"], "did you mean drafters?"),
        (["list", "--jsno"], "did you mean --json?"),
        (["run", "a", "--max-tokens", "many"], "--max-tokens"),
        (["run", "a", "b"], "b"),
        (["pull"], "NAME"),
        (["list", "--zzz"], "no such option: --zzz; see"),
    ],
)
def test_a_wrong_word_ends_with_2_and_the_right_one(cli, words, hint):
    ran = cli(*words)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    assert hint in ran.err


def test_an_option_without_its_value_and_a_group_without_a_command_name_the_help_that_helps(cli):
    assert "see `outrider plan --help`" in cli("plan", "--memory").err
    bare = cli("train")
    assert bare.code == 2
    assert bare.err.strip().endswith("error: name one of its commands; see `outrider train --help`")


def test_a_hint_names_only_options_the_command_has(cli):
    assert "--drafter" not in cli("list", "--draft-model", "x").err


def test_interrupted(cli, stage, monkeypatch):
    def interrupted(passes: int) -> None:
        raise KeyboardInterrupt

    stage.before_score = interrupted
    ran = cli("run", "a")
    assert ran.code == 130
    assert "Traceback" not in ran.err


def test_what_nobody_foresaw_is_one_line_unless_debugging(cli, stage, monkeypatch):
    def broken(passes: int) -> None:
        raise ValueError("two\nlines \x1b[31m")

    stage.before_score = broken
    ran = cli("run", "a")
    assert ran.code == 1
    assert ran.err.startswith("error: ValueError: two lines ␛[31m")
    assert ran.err.count("\n") == 1
    monkeypatch.setenv("OUTRIDER_DEBUG", "1")
    with pytest.raises(ValueError, match="two"):
        cli("run", "a")


def test_a_loss_of_losslessness_is_never_caught(cli, stage):
    def lossy(passes: int) -> None:
        raise LosslessError("differs")

    stage.before_score = lossy
    with pytest.raises(LosslessError):
        cli("run", "a")


def test_errors_are_red_on_a_terminal(cli, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert cli("rnu").err.startswith("\x1b[31merror: ")


def test_options_are_named_and_defaulted_as_in_the_library():
    assert SamplingOptions().params() == SamplingParams()
    ours, loader = {f.name: f.default for f in fields(ModelOptions)}, LoadOptions()
    assert ours.pop("model") == "demo"
    assert ours == {name: getattr(loader, name) for name in ours}
    left_out = {f.name for f in fields(SamplingParams)} - {f.name for f in fields(SamplingOptions)}
    assert left_out == {"n", "logprobs", "logits_processors"}
    left_out = set(LoadOptions.__slots__) - set(ours)
    assert left_out == {"max_round_tokens", "max_draft", "reserved"}  # set by `LLM` itself
    assert llm.LLM.__init__.__kwdefaults__["max_batch"] == ModelOptions().max_batch


def test_an_interrupt_while_torch_is_imported_ends_the_process(monkeypatch):
    """Its own import would swallow one. Behind it, Ctrl-C is what it was."""
    before, met = signal.getsignal(signal.SIGINT), []
    monkeypatch.setattr(importlib, "import_module", lambda name: met.append((name, signal.getsignal(signal.SIGINT))))
    verb = flatten_options(lambda: None)
    verb()
    other = threading.Thread(target=verb)
    other.start()
    other.join()
    assert met == [("torch", signal.SIG_DFL), ("torch", before)]
    assert signal.getsignal(signal.SIGINT) is before
