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
    assert kept["command"].endswith("script.py --model model.gguf --tokens 5")
    assert str(tmp_path) not in kept["command"].split(" ", 2)[2], "no folder of this machine"
    assert {"commit", "machine", "versions", "began", "format"} <= set(kept)


def test_a_script_that_fails_leaves_nothing(record, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('half')\nraise SystemExit(3)\n")
    with pytest.raises(subprocess.CalledProcessError):
        record.record("run", [str(script)])
    assert not list((tmp_path / "results").iterdir())
