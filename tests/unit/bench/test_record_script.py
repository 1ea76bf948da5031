"""benchmarks/record.py: what a script prints is kept with its command; a script that fails leaves nothing."""

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "record.py"


@pytest.fixture
def record(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("record", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    return module


def test_the_output_is_kept_with_command_and_machine(record, tmp_path):
    script, model = tmp_path / "script.py", tmp_path / "model.gguf"
    script.write_text("import sys\nprint('first')\nprint(len(sys.argv))\n")
    model.write_text("")
    kept = json.loads(record.record("run", [str(script), "--model", str(model), "--tokens", "5"]).read_text())
    assert kept["output"] == ["first", "5"]
    assert kept["command"] == "python script.py --model model.gguf --tokens 5", "no folder of this machine"
    assert {"commit", "machine", "versions", "began", "format"} <= set(kept)


def test_a_machine_without_a_checkout_is_told_the_commit(record, tmp_path, monkeypatch, capsys):
    script = tmp_path / "script.py"
    script.write_text(f"print('read {tmp_path}/script.py, wrote {tmp_path}/new, 3/4 of 1/2 at http://a/b/c')\n")
    monkeypatch.setattr(record, "commit", lambda: "")
    with pytest.raises(ValueError, match="--commit"):
        record.record("run", [str(script)])
    (tmp_path / "back").mkdir()
    words = ["run", "--commit", "abc", "--into", f"{tmp_path}/back", "--", str(script)]
    monkeypatch.setattr("sys.argv", ["record.py", *words])
    record.main()
    kept = json.loads((tmp_path / "back" / "run.json").read_text())
    assert (kept["commit"], kept["command"]) == ("abc", "python script.py")
    assert kept["output"] == ["read script.py, wrote new, 3/4 of 1/2 at http://a/b/c"]
    assert f"read {tmp_path}/script.py" in capsys.readouterr().out, "printed as it comes"


def test_a_script_that_fails_leaves_nothing(record, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('half')\nraise SystemExit(3)\n")
    with pytest.raises(subprocess.CalledProcessError):
        record.record("run", [str(script)])
    assert not list((tmp_path / "results").iterdir())
