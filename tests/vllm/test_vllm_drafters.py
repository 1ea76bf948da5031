"""What is trained here drafts in the real vLLM: a draft model and an EAGLE-3 head, with the same greedy text."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from client_vllm import ENVIRONMENT, model_folder

from outrider.advise.export import Choice, export_to, with_vllm_head
from outrider.cli.main import main
from outrider.core.sampling import SamplingParams
from outrider.llm import LLM

pytestmark = pytest.mark.vllm
TOKENS, DRAFTS = 48, 3
PROMPTS = ("tell me of the sea", "mudt.mudt.munt", "the sky is", "name one river", "a, b, c, d")
RUN = """
import json, sys
from vllm import LLM, SamplingParams
given = json.loads(sys.argv[1])
llm = LLM(model=given["target"], speculative_config=given["config"], dtype="float32", enforce_eager=True,
          max_model_len=512, max_num_seqs=4, disable_log_stats=False)
answers = llm.generate(given["prompts"], SamplingParams(temperature=0, max_tokens=given["tokens"], ignore_eos=True))
counts = {each.name: each.value for each in llm.get_metrics() if hasattr(each, "value")}
told = {name: counts[f"vllm:spec_decode_num_{name}"] for name in ("drafts", "draft_tokens", "accepted_tokens")}
print("\\n" + json.dumps({"texts": [each.outputs[0].text for each in answers]} | told))
"""


@pytest.fixture(scope="module")
def target() -> str:
    return str(model_folder(layers=6))


@pytest.fixture(scope="module")
def answers(target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "prompts.txt").write_text("\n".join(f"{i} is a number, and so is {i * i}" for i in range(80)))
    words = ["collect", target, "--prompts", folder / "prompts.txt", "--out", folder / "answers", "--max-tokens", 48]
    train(*words, "--device", "cpu")
    return folder / "answers"


def train(*words: Any) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", *map(str, words)])
    assert not end.value.code


def run_vllm(target: str, config: dict[str, Any]) -> dict[str, Any]:
    python = Path(os.environ["OUTRIDER_TEST_VLLM"]).parent / "python"
    given = {"target": target, "config": config, "prompts": PROMPTS, "tokens": TOKENS}
    env = os.environ | ENVIRONMENT | {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    words = [str(python), "-c", RUN, json.dumps(given)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=3600, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("kind", "drafter", "method", "words"),
    [
        ("draft", "draft-model", "draft_model", ["--layers", 1]),
        ("eagle3", "eagle", "eagle3", ["--draft-vocab", 128, "--steps", DRAFTS, "--taps", "1,2,4"]),
        ("eagle3", "eagle", "eagle3", ["--draft-vocab", 0, "--steps", DRAFTS, "--taps", "1,2,4"]),
    ],
    ids=["draft", "eagle3", "eagle3-whole"],
)
def test_what_is_trained_drafts_in_vllm(
    target: str, answers: Path, tmp_path: Path, kind: str, drafter: str, method: str, words: list[Any]
):
    """The text is that of the target alone, and as many tokens are accepted as here, but for each text's last round."""
    few = ("--device", "cpu", "--epochs", 3, "--length", 128, "--looks", 1, "--measured", 0, "--step-tokens", 512)
    train(kind, target, "--answers", answers, "--out", tmp_path, *few, *words)
    spec = f"{drafter}:model={tmp_path / 'drafter'},k={DRAFTS}"
    made = export_to("vllm", with_vllm_head(Choice(target, spec, DRAFTS)))
    assert made.arguments["method"] == method
    told = run_vllm(target, made.arguments)
    options = {"dtype": "float32", "quantize": "none", "device": "cpu", "cache_tokens": 4096}
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    plain = LLM(target, drafter="none", **options).generate(list(PROMPTS), params)
    ours = LLM(target, drafter=spec, adaptive=False, **options).generate(list(PROMPTS), params)
    assert told["texts"] == [each.text for each in plain] == [each.text for each in ours]
    accepted = sum(each.stats.all.accepted for each in ours)
    print(f"{method}: vLLM accepts {told['accepted_tokens']} of {told['draft_tokens']}, this package {accepted}")
    assert accepted > 0
    assert abs(told["accepted_tokens"] - accepted) <= len(PROMPTS) * DRAFTS
