"""The options of `serve` for other engines: what is translated, and what is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.cli.options import DraftingOptions, ModelOptions
from outrider.cli.screen import Screen
from outrider.cli.serve_engine import EngineOptions, speculative_config, vllm_start
from outrider.core.errors import ConfigError
from outrider.drafters.speculative_config import from_vllm


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"engine": "sglang"}, "choose one of: outrider, vllm"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size belongs to --engine vllm"),
        ({"engine": "vllm", "tensor_parallel_size": 0}, "must be 1 to"),
        ({"engine": "vllm", "engine_api_key": "x"}, "a key of its own"),
        ({"engine_url": ["http://x"], "engine_arg": ["--y"]}, "--engine-arg is for a vLLM that is started"),
    ],
)
def test_options_that_do_not_go_together(given: dict, said: str):
    with pytest.raises(ConfigError, match=said):
        EngineOptions(**given)


@pytest.mark.parametrize(
    ("drafting", "model", "said"),
    [
        ({"fixed": True}, {}, "--fixed has no effect with --engine vllm: vLLM drafts always"),
        ({"mode": "distribution"}, {}, "--mode has no effect"),
        ({}, {"max_batch": 4}, "use --max-running"),
        ({}, {"pinned": True}, "VLLM_BATCH_INVARIANT"),
        ({"drafter": "auto"}, {}, "outrider advise"),
        ({"drafter": "suffix+prediction"}, {}, "mixes drafters"),
        ({"drafter": "prediction"}, {}, "vLLM"),
        ({"speculative_config": "{"}, {}, "not JSON"),
        ({"speculative_config": "[]"}, {}, "JSON object"),
    ],
)
def test_what_vllm_cannot_is_refused_before_it_starts(stub_model: Path, drafting: dict, model: dict, said: str):
    asked = DraftingOptions(**drafting), ModelOptions(model=str(stub_model), **model)
    with pytest.raises(ConfigError, match=said):
        vllm_start(EngineOptions(engine="vllm"), *asked, "name", Screen())


@pytest.mark.parametrize("words", [("--max-batch", "8"), ("--mode", "seeded"), ("--device=auto",)])
@pytest.mark.parametrize("engine", [("--engine", "vllm"), ("--engine-url", "http://127.0.0.1:9")])
def test_an_option_that_is_named_with_its_default_is_refused_too(cli, engine: tuple[str, str], words: tuple[str, ...]):
    ran = cli("serve", "demo", *engine, *words)
    assert ran.code == 2
    assert f"{words[0].partition('=')[0]} has no effect with {' '.join(engine)[:12]}" in ran.err


@pytest.mark.parametrize("drafter", ["suffix:k=8", "prompt-lookup:k=5", "draft-model:model=some/model,k=3"])
def test_the_reader_of_vllm_s_configurations_reads_what_is_written(drafter: str, tmp_path: Path):
    """The mapping there and the mapping back: the same drafter and length."""
    config = speculative_config(DraftingOptions(drafter=drafter), str(tmp_path))
    back = from_vllm(json.dumps(config))
    assert back.traits.name == drafter.partition(":")[0]
    assert back.traits.max_tokens == int(drafter.rpartition("k=")[2])


def test_without_a_drafter_nothing_is_drafted(tmp_path: Path):
    assert speculative_config(DraftingOptions(), str(tmp_path)) == {}
    given = '{"method": "ngram", "num_speculative_tokens": 2, "new_option": 1}'
    assert speculative_config(DraftingOptions(speculative_config=given), str(tmp_path)) == json.loads(given)


@pytest.fixture
def stub_model(tmp_path: Path) -> Path:
    """A folder that looks like a model to the name resolver; nothing is loaded from it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder
