"""What docs/serving.md tells people to type does what it says, on a tiny model that goes by the demo's name."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_world import ENVIRONMENT, Process, process, write_tiny_model

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line.removeprefix("$ ") for line in PAGE.splitlines() if line.startswith("$ ")]
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """`outrider serve demo`, as the page starts it, but for the model's size and the port."""
    with process(write_tiny_model(tmp_path_factory.mktemp("tiny")), name="demo") as made:
        yield made


def test_the_page_starts_a_server_by_a_command_there_is():
    installing, serving, *asking = COMMANDS
    assert installing == "pip install 'outrider[serve]'"
    assert serving == "outrider serve demo"
    assert all(command.startswith("curl ") for command in asking)
    said = subprocess.run(
        [sys.executable, "-m", "outrider", "serve", "--help"], capture_output=True, text=True, check=True
    )
    for option in sorted(set(re.findall(r"`(--[a-z-]+)`", PAGE))):
        assert option in said.stdout, option


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("curl ")])
def test_a_command(server: Process, command: str):
    done = subprocess.run(
        shlex.split(command.replace(ADDRESS, server.url)), capture_output=True, text=True, check=True, timeout=60
    )
    if "-N" in command:
        assert done.stdout.endswith("data: [DONE]\n\n")
    elif "models" in command:
        assert json.loads(done.stdout)["data"][0]["id"] == "demo"
    else:
        assert json.loads(done.stdout)["choices"][0]["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize("code", SNIPPETS, ids=range(len(SNIPPETS)))
def test_a_snippet(server: Process, code: str):
    assert ADDRESS in code
    done = subprocess.run(
        [sys.executable, "-c", code.replace(ADDRESS, server.url)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    if "print" in code:
        assert done.stdout.strip()


def test_it_stops_as_the_page_says(server: Process):
    """The last of this file: nothing answers after it."""
    server.popen.send_signal(signal.SIGTERM)
    assert server.popen.wait(20) == 0
