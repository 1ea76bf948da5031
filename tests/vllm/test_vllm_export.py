"""What is exported and what is shipped, taken by the real vLLM's own parser and configuration classes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import httpx
import pytest
from client_vllm import ENVIRONMENT, START_SECONDS, model_folder
from server_world import until

from outrider.advise.export import Choice, export_to
from outrider.advise.export_check import check_export
from outrider.checkpoints.resolve import resolve
from outrider.cli.main import main
from outrider.core.errors import ConfigError
from outrider.drafters.shipped import shipped_heads
from outrider.models.heads.packed import multiplies_bfloat16

pytestmark = pytest.mark.vllm
# In vLLM's Python: its own configuration of the target and the head. vLLM's CPU backend itself runs no DSpark head.
CONFIGURE = """
import json, sys
from vllm.config import ParallelConfig
from vllm.engine.arg_utils import EngineArgs
target, config = sys.argv[1], json.loads(sys.argv[2])
args = EngineArgs(model=target, speculative_config=config, dtype="float32", enforce_eager=True, max_model_len=512)
found = args.create_speculative_config(args.create_model_config(), ParallelConfig())
draft = found.draft_model_config
told = {"method": found.method, "tokens": found.num_speculative_tokens}
if draft is not None:
    told |= {"architectures": draft.architectures, "vocab": draft.hf_config.draft_vocab_size}
    told["layers"] = draft.hf_config.target_layer_ids
print("\\n" + json.dumps(told))
"""


@pytest.fixture(scope="module")
def python() -> str:
    return str(Path(os.environ["OUTRIDER_TEST_VLLM"]).parent / "python")


def configured(python: str, config: dict[str, object]) -> dict[str, object]:
    words = [python, "-c", CONFIGURE, str(resolve("demo")), json.dumps(config)]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=3600, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("drafter", ["prompt-lookup", "suffix", "draft-model:model=small", "mtp"])
def test_vllm_s_parser_takes_what_is_exported(python, drafter):
    checked = check_export(export_to("vllm", Choice("t", drafter, 4)), python)
    assert checked.installed


def test_vllm_s_parser_refuses_what_is_wrong(python):
    made = export_to("vllm", Choice("t", "prompt-lookup", 4))
    made.arguments["num_speculative_tokens"] = 0
    with pytest.raises(ConfigError, match="does not take"):
        check_export(made, python)
    made.arguments.update(num_speculative_tokens=4, draft_length=3)
    with pytest.raises(ConfigError, match="no draft_length"):
        check_export(made, python)


def test_the_shipped_head_is_one_by_vllm_s_configuration_classes(python):
    head = next(shipped_heads())
    given = json.loads((head.folder / "config.json").read_text())
    made = export_to("vllm", Choice("demo", head.drafter, 7, shipped=str(head.folder)))
    told = configured(python, made.arguments)
    assert (told["method"], told["tokens"]) == (given["speculators_model_type"], 7)
    assert told["architectures"] == ["Qwen3DSparkModel"]
    assert told["vocab"] == given["draft_vocab_size"]
    assert told["layers"] == [layer - 1 for layer in given["aux_hidden_state_layer_ids"]], "vLLM counts inputs"


def run(*words: object) -> None:
    with pytest.raises(SystemExit) as end:
        main(list(map(str, words)))
    assert not end.value.code


@pytest.fixture(scope="module")
def advice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What advise says of a small target, with a draft model to try."""
    folder = tmp_path_factory.mktemp("advice")
    (folder / "prompts.txt").write_text("tell me of the sea\nand of the sky\n")
    few = ("--max-tokens", 16, "--temperatures", 0, "--batches", 1, "--contexts", 64, "--cache-tokens", 4096)
    asked = ("--draft", model_folder(layers=1), "--prompts", folder / "prompts.txt", "--threads", 1, *few)
    run("advise", model_folder(), *asked, "--out", folder / "advise.json")
    return folder / "advise.json"


@pytest.mark.skipif(not multiplies_bfloat16(), reason="vLLM's own default, bfloat16, ends its worker on this processor")
@pytest.mark.parametrize("drafter", ["prompt-lookup", "suffix", "draft-model"])
@pytest.mark.parametrize("with_file", [False, True], ids=["words", "file"])
def test_an_exported_command_starts_vllm(advice: Path, python: str, tmp_path: Path, capsys, drafter, with_file):
    """The command is run as it is printed. vLLM listens on its own default port, which must be free."""
    out = ("--out", tmp_path / "config.yaml") if with_file else ()
    drafter += f":model={model_folder(layers=1)}" if drafter == "draft-model" else ""
    capsys.readouterr()
    run("export", "vllm", "--from", advice, "--drafter", drafter, "--python", python, *out)
    (command,) = capsys.readouterr().out.splitlines()
    assert command.startswith("vllm serve ")
    path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | ENVIRONMENT | {"HF_HUB_OFFLINE": "1", "PATH": path}
    with (tmp_path / "log").open("w") as log, httpx.Client(base_url="http://127.0.0.1:8000", timeout=300) as client:
        vllm = subprocess.Popen(shlex.split(command), stdout=log, stderr=log, env=env)
        try:
            until(lambda: vllm.poll() is not None or _is_ready(client), START_SECONDS)
            assert vllm.poll() is None, (tmp_path / "log").read_text()[-3000:]
            body = {"prompt": "mudt.mudt.mudt.", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 24
            counts = [line for line in client.get("/metrics").text.splitlines() if "num_draft_tokens_total{" in line]
            assert sum(float(line.split()[-1]) for line in counts) > 0
        finally:
            vllm.terminate()
            vllm.wait(60)


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.HTTPError:
        return False
