"""What is exported and what is shipped, taken by the real vLLM's own parser and configuration classes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from outrider.advise.export import Choice, export_to
from outrider.advise.export_check import check_export
from outrider.checkpoints.resolve import resolve
from outrider.core.errors import ConfigError
from outrider.drafters.shipped import shipped_heads

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
    command = os.environ.get("OUTRIDER_TEST_VLLM")
    if not command:
        pytest.fail("set OUTRIDER_TEST_VLLM to the vllm command, or run make test-vllm")
    return str(Path(command).parent / "python")


def configured(python: str, config: dict[str, object]) -> dict[str, object]:
    words = [python, "-c", CONFIGURE, str(resolve("demo")), json.dumps(config)]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=900, env=env)
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
