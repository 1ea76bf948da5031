"""What a caller may get wrong: options, sampling, prompts, devices, config.json. Each is said, none ignored."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from outrider.core.errors import ConfigError, OutriderError, RequestError
from outrider.core.sampling import SamplingParams
from outrider.engine.request import EngineLimits, Request, validate_request
from outrider.llm import LLM
from outrider.loading import load as loading
from outrider.loading.load import LoadedModel, LoadOptions, choose_device, load
from outrider.loading.memory import reserved_memory_of
from outrider.testing.synthetic import SHAPES, save_decoder, synthetic_pair
from outrider.testing.toy import ByteTokenizer, ToyRunner

CONTEXT = 64


class Bytes(ByteTokenizer):
    """Text and its bytes, with what LLM asks of a tokenizer besides."""

    eos_ids = frozenset[int]()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(text.encode())


def toy(drafter: str = "none", **options: Any) -> LLM:
    made = ToyRunner(257, context=CONTEXT, cache_tokens=1024)
    loaded = LoadedModel("toy", Path("toy"), made, Bytes(), "float32")  # pyright: ignore[reportArgumentType]
    return LLM(loaded, drafter=drafter, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model on disk."""
    path = tmp_path_factory.mktemp("tiny")
    save_decoder(synthetic_pair("tiny", dtype=torch.float32).draft, SHAPES["tiny"] | {"num_hidden_layers": 2}, path)
    return str(path)


def rewritten(folder: str, into: Path, text: str) -> str:
    """The same model with another config.json."""
    for file in Path(folder).iterdir():
        (into / file.name).write_bytes(file.read_bytes())
    (into / "config.json").write_text(text)
    return str(into)


# A prediction


def test_a_prediction_is_cut_to_what_a_text_can_hold():
    request = toy("prediction").request("hi", prediction="etaoin shrdlu " * 1000)
    assert bytes(request.prediction) == (b"etaoin shrdlu " * 1000)[:CONTEXT]
    short = toy("prediction").request("hi", prediction="hello")
    assert bytes(short.prediction) == b"hello"


def test_a_prompt_that_cannot_fit_is_refused_before_its_tokens_are_looked_at():
    class Unread(int):
        def __lt__(self, other: int) -> bool:
            raise AssertionError("looked at")

        __ge__ = __lt__

    target = ToyRunner(257, context=CONTEXT, cache_tokens=1024)
    with pytest.raises(RequestError, match="leave room for one more"):
        validate_request(Request(prompt=(Unread(1),) * CONTEXT), target)


# Memory


def test_the_cache_is_sized_by_what_can_be_had_not_by_what_lies_idle(monkeypatch: pytest.MonkeyPatch):
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").is_file() else []
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    if not available:
        pytest.skip("no /proc/meminfo with MemAvailable here")
    idle = {"SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": 2000}
    monkeypatch.setattr(os, "sysconf", idle.__getitem__)  # 8 MB, as where the page cache is warm
    found = loading._affordable_tokens(1 << 20, 1 << 40) << 20
    assert found == pytest.approx(available[0] / 4, rel=0.2)


@pytest.mark.parametrize("fault", [ValueError("unrecognized configuration name"), OSError(22, "no")])
def test_a_system_that_says_nothing_of_its_memory_still_gets_a_cache(monkeypatch: pytest.MonkeyPatch, fault: Exception):
    def refuse(*_: Any, **__: Any) -> Any:
        raise fault

    monkeypatch.setattr(loading.Path, "read_text", refuse)
    monkeypatch.setattr(os, "sysconf", refuse)
    assert loading._affordable_tokens(46_080, 8192) == 8192


def test_a_short_context_alone_gets_the_least_cache(folder: str):
    pool = load(folder, device="cpu", context=16, max_batch=1).target.pool
    assert pool.count * pool.size == 64


# config.json

BROKEN = {
    "vocab_size": "512",
    "hidden_size": -64,
    "intermediate_size": [128],
    "num_hidden_layers": 10**9,
    "num_attention_heads": True,
    "num_key_value_heads": "2",
    "max_position_embeddings": 0,
    "rms_norm_eps": -1.0,
    "rope_theta": "10000",
    "rope_scaling": "x",
    "rope_parameters": [1],
    "tie_word_embeddings": "yes",
    "hidden_act": ["silu"],
    "architectures": 5,
    "model_type": 7,
}


@pytest.mark.parametrize("field", BROKEN)
def test_a_wrong_value_in_config_json_is_named_with_its_file(folder: str, tmp_path: Path, field: str):
    told = json.loads((Path(folder) / "config.json").read_text()) | {field: BROKEN[field]}
    broken = rewritten(folder, tmp_path, json.dumps(told))
    for read in (load, reserved_memory_of):
        with pytest.raises(ConfigError, match=f"config.json: {field} must be"):
            read(broken)


@pytest.mark.parametrize("scaling", [{"rope_type": ["linear"]}, {"rope_type": "linear", "factor": "2"}])
def test_a_wrong_value_inside_a_rope_is_named(folder: str, tmp_path: Path, scaling: dict[str, Any]):
    told = json.loads((Path(folder) / "config.json").read_text())
    told = {key: value for key, value in told.items() if not key.startswith("rope_")} | {"rope_scaling": scaling}
    with pytest.raises(ConfigError, match=r"config.json: (factor|rope_type) must be"):
        load(rewritten(folder, tmp_path, json.dumps(told)))


@pytest.mark.parametrize("text", ["{", "[]", "null", "[" * 100_000, '"\\ud800'])
def test_a_config_json_that_is_no_object_is_said(folder: str, tmp_path: Path, text: str):
    broken = rewritten(folder, tmp_path, text)
    for read in (load, reserved_memory_of):
        with pytest.raises(ConfigError, match=r"config.json is not (JSON|a JSON object)"):
            read(broken)


# Options


def test_options_of_load_are_refused_where_the_model_is_loaded():
    with pytest.raises(ConfigError, match="context, nonsense: this model is loaded already"):
        toy(context=32, nonsense=1)


def test_options_in_two_places_are_refused(folder: str):
    with pytest.raises(ConfigError, match="nonsense beside LoadOptions"):
        load(folder, LoadOptions(), nonsense=1)


@pytest.mark.parametrize(
    "option",
    [
        {"max_round_tokens": 0},
        {"max_round_tokens": True},
        {"max_batch": 0},
        {"max_batch": 2.5},
        {"max_batch": 10**6},
    ],
)
def test_a_round_is_a_whole_number_within_bounds(folder: str, option: dict[str, Any]):
    (name,) = option
    for make in (toy, lambda **given: load(folder, **given), lambda **given: LLM(folder, **given)):
        with pytest.raises(ConfigError, match=f"{name} must be a whole number from 1 to"):
            make(**option)
    with pytest.raises(ConfigError, match=f"{name} must be a whole number from 1 to"):
        EngineLimits(**option)


@pytest.mark.parametrize(
    "option",
    [
        {"cache_tokens": 0},
        {"cache_tokens": -5},
        {"cache_tokens": -500},
        {"cache_tokens": 63},
        {"cache_tokens": 1e3},
        {"context": 0},
        {"context": 31.5},
        {"context": "32"},
        {"max_draft": -1},
    ],
)
def test_a_cache_is_a_whole_number_within_bounds(folder: str, option: dict[str, Any]):
    (name,) = option
    with pytest.raises(ConfigError, match=f"{name} must be a whole number from"):
        load(folder, **option)


# Sampling


@pytest.mark.parametrize(
    "option",
    [
        {"stop": None},
        {"stop": 3.5},
        {"stop": [None]},
        {"stop_token_ids": None},
        {"banned_token_ids": 2.5},
        {"allowed_token_ids": 2.5},
        {"logits_processors": None},
        {"logits_processors": [5]},
        {"logit_bias": None},
        {"logit_bias": [(5, 1.0)]},
        {"logit_bias": {5: None}},
        {"logit_bias": {True: 1.0}},
        {"logit_bias": {5: True}},
        {"logit_bias": {5: 10**400}},
        {"logit_bias": {5: 1e39}},
        {"temperature": 10**400},
        {"temperature": 10**5000},
        {"temperature": float("inf")},
        {"top_k": 10**5000},
        {"seed": -(10**400)},
    ],
    ids=lambda option: next(iter(option)),
)
def test_sampling_says_what_is_wrong(option: dict[str, Any]):
    (name,) = option
    with pytest.raises(RequestError, match=name.rstrip("s")) as told:
        SamplingParams(**option)
    assert len(str(told.value)) < 300


def test_the_largest_bias_decides_and_stays_finite():
    llm = toy()
    for temperature in (0.0, 1.0, 1e-30):
        params = SamplingParams(max_tokens=3, temperature=temperature, seed=1, logit_bias={5: 1e9, 6: -1e9})
        assert llm.generate("hi", params).tokens == (5, 5, 5)


def test_one_allowed_token_may_be_named_alone():
    params = SamplingParams(allowed_token_ids=5, max_tokens=2)  # pyright: ignore[reportArgumentType]
    assert toy().generate("hi", params).tokens == (5, 5)


# Prompts


@pytest.mark.parametrize("ids", [np.array([65, 66]), [np.int64(65), np.uint8(66)], (65, 66), [65, np.int32(66)]])
def test_ids_of_any_integer_type_are_a_prompt(ids: Any):
    llm, params = toy(), SamplingParams(max_tokens=4)
    expected, pair = llm.generate("AB", params), cast(list[list[int]], [ids, ids])
    assert llm.generate(ids, params).tokens == expected.tokens
    assert [each.tokens for each in llm.generate(pair, params)] == [expected.tokens] * 2


@pytest.mark.parametrize(
    "prompts", [[[1.9, 2.2]], [1.9, 2.2], [[True, False]], [["a", "b"]], [[65, None]], [[65, 2.0]]]
)
def test_what_is_no_id_is_refused_by_name(prompts: Any):
    with pytest.raises(RequestError, match=r"whole numbers, got|text, token ids or messages; got"):
        toy().generate(prompts, SamplingParams(max_tokens=1))


# Devices


@pytest.mark.parametrize("name", ["mps", "xpu", "meta", "cuda:99", "cpu:1", "nothing", 3.5])
def test_a_device_that_is_not_here_is_refused(name: Any):
    if name == "xpu" and torch.xpu.is_available():
        pytest.skip("xpu is here")
    with pytest.raises(ConfigError, match="here are: cpu"):
        choose_device(name)


@pytest.mark.parametrize("name", ["mps", "mps:0"])
def test_mps_is_refused_with_the_reason_even_where_it_is_here(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"sampling needs float64, which mps lacks; here are: cpu"):
        choose_device(name)
    with pytest.raises(ConfigError) as refused:
        choose_device("nothing")
    assert "mps" not in str(refused.value)


def test_the_processor_is_always_here():
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("cpu:0").type == "cpu"
    assert choose_device("auto").type in ("cpu", "cuda")


def test_a_benchmark_takes_no_cache_of_nothing():
    from outrider.cli.bench_rounds import RoundsOptions, rounds
    from outrider.cli.options import DraftingOptions, RuntimeOptions

    options = RoundsOptions(name="synthetic", max_tokens=4)
    refused: list[dict[str, Any]] = [{"cache_tokens": 0}, {"context": 0}, {"context": 10**6}]
    for option in refused:
        with pytest.raises(OutriderError, match=f"{next(iter(option))} must be"):
            rounds(options, DraftingOptions(), RuntimeOptions(device="cpu", **option))
