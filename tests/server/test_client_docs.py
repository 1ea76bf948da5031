"""docs/clients.md: every piece of code on it does what it says, judged by the offline engine."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from client_world import QUESTION, TIMEOUT, VLLM, Served, offline, refused, snippets

PYTHON = len(snippets("python", ""))
ANSWER = offline(QUESTION, temperature=0).text


@pytest.mark.parametrize("place", range(PYTHON))
def test_python(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: int):
    file = tmp_path / "ask.py"
    code = snippets("python", served.url)[place]
    file.write_text(code)
    for module in re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE):
        pytest.importorskip(module, reason=f"{module} is not installed here: make test-clients")
    if VLLM and "prediction=" in code:
        with pytest.raises(openai.BadRequestError, match=refused("prediction")):
            runpy.run_path(str(file))
        return
    runpy.run_path(str(file))
    assert capsys.readouterr().out.startswith(ANSWER)


def test_curl(served: Served):
    if not shutil.which("curl"):
        pytest.skip("curl is not on this machine")
    command = next(code for code in snippets("bash", served.url) if code.startswith("curl"))
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=TIMEOUT, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == ANSWER


def test_llm(served: Served, tmp_path: Path):
    (models,) = snippets("yaml", served.url)
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    command = next(code for code in snippets("bash", served.url) if code.startswith("llm"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"LLM_USER_PATH": str(tmp_path), "PATH": path}
    done = subprocess.run(
        ["bash", "-c", command], env=env, capture_output=True, text=True, timeout=2 * TIMEOUT, check=True
    )
    assert done.stdout == ANSWER + "\n"
