"""vLLM's speculative configurations, as people write them."""

import json

import pytest

from outrider.core.errors import ConfigError
from outrider.drafters.block import BlockConfig
from outrider.drafters.draft_model import DraftModelConfig
from outrider.drafters.eagle import EagleConfig
from outrider.drafters.medusa import MedusaConfig
from outrider.drafters.mtp import MtpConfig
from outrider.drafters.prompt_lookup import PromptLookupConfig
from outrider.drafters.speculative_config import from_vllm
from outrider.drafters.suffix import SuffixConfig


def ngram(k, longest, shortest):
    return PromptLookupConfig(k=k, max_match=longest, min_match=shortest, min_prob=0)


def suffix(k, depth=24, requests=10_000, factor=1.0, prob=0.1):
    return SuffixConfig(k=k, max_depth=depth, cached_requests=requests, factor=factor, min_prob=prob)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ('{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}', ngram(5, 4, 4)),
        (
            '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_min":3,"prompt_lookup_max":3}',
            ngram(3, 3, 3),
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 7, "prompt_lookup_min": 2}',
            ngram(8, 7, 2),
        ),
        ('{"method": "ngram", "num_speculative_tokens": 5}', ngram(5, 5, 5)),
        ('{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2}', ngram(5, 2, 2)),
        ('{"model": "[ngram]", "num_speculative_tokens": 5, "prompt_lookup_max": 4}', ngram(5, 4, 4)),
        ('{"model": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": null}', ngram(4, 5, 5)),
        ('{"method": "suffix", "num_speculative_tokens": 32}', suffix(32)),
        ('{"method": "suffix"}', suffix(24)),
        (
            '{"method":"suffix","num_speculative_tokens":16,"suffix_decoding_max_tree_depth":32,'
            '"suffix_decoding_max_cached_requests":1000,"suffix_decoding_max_spec_factor":2.0,'
            '"suffix_decoding_min_token_prob":0.05}',
            suffix(16, 32, 1000, 2.0, 0.05),
        ),
        ('{"method": "suffix", "suffix_decoding_max_cached_requests": 0}', suffix(24, requests=0)),
        ('{"method": "suffix", "suffix_decoding_max_tree_depth": 64}', suffix(64, 64)),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 4}, suffix(24, factor=4)),
    ],
)
def test_a_configuration_we_have(config, expected):
    assert from_vllm(config) == expected
    if isinstance(config, str):
        assert from_vllm(json.loads(config)) == expected


@pytest.mark.parametrize(
    "config",
    [
        '{"model": "Qwen/Qwen2.5-0.5B-Instruct", "num_speculative_tokens": 5}',
        '{"method": "draft_model", "model": "Qwen/Qwen2.5-0.5B-Instruct", "num_speculative_tokens": 5}',
        '{"model": "Qwen/Qwen2.5-0.5B-Instruct", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 1}',
    ],
)
def test_a_draft_model(config):
    drafter = from_vllm(config)
    assert (type(drafter).__name__, drafter.model, drafter.k) == ("DraftModelConfig", "Qwen/Qwen2.5-0.5B-Instruct", 5)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ('{"method": "eagle3", "model": "org/EAGLE3-x", "num_speculative_tokens": 3}', "eagle3"),
        ('{"method": "eagle", "model": "org/EAGLE3-x", "num_speculative_tokens": 3}', "eagle"),
        ('{"model": "org/EAGLE3-x", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}', "eagle3"),
    ],
)
def test_an_eagle_head(config, kind):
    assert from_vllm(config) == EagleConfig(model="org/EAGLE3-x", k=3, kind=kind)
    assert from_vllm('{"model": "org/EAGLE-x", "num_speculative_tokens": 4}').kind == "eagle"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"method": "medusa", "model": "a", "num_speculative_tokens": 3}, MedusaConfig(model="a", k=3, tree=0)),
        ({"method": "dflash", "model": "a", "num_speculative_tokens": 15}, BlockConfig(model="a", k=15)),
        ({"method": "dspark", "model": "a", "num_speculative_tokens": 7}, BlockConfig(model="a", k=7)),
        (
            {"model": "org/Qwen3-8B-DFlash-b16", "num_speculative_tokens": 15, "revision": "v2"},
            BlockConfig(model="org/Qwen3-8B-DFlash-b16@v2", k=15),
        ),
        ({"method": "mtp", "num_speculative_tokens": 2}, MtpConfig(k=2)),
        ({"method": "mtp", "model": "a", "num_speculative_tokens": 2, "revision": "b"}, MtpConfig(model="a@b", k=2)),
        *(
            ({"method": method, "num_speculative_tokens": 1}, MtpConfig(k=1))
            for method in ("deepseek_mtp", "mimo_mtp", "qwen3_next_mtp", "qwen3_5_mtp")
        ),
    ],
)
def test_other_heads(config, expected):
    assert from_vllm(config) == expected


def test_a_folder_with_no_head_is_a_draft_model(tmp_path):
    config = {"model": str(tmp_path), "num_speculative_tokens": 4}
    assert from_vllm(config) == DraftModelConfig(model=str(tmp_path), k=4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"method": "eagle3", "num_speculative_tokens": 2}', "method eagle3 needs model, the folder"),
        ('{"method": "eagle3", "model": "x"}', "needs num_speculative_tokens"),
        (
            '{"method": "draft_model", "model": "org/EAGLE3-x", "num_speculative_tokens": 2}',
            "is a drafting head; its method is eagle3",
        ),
        (
            '{"method": "eagle", "model": "x", "num_speculative_tokens": 2, "speculative_token_tree": "[(0,)]"}',
            "'speculative_token_tree' cannot be honoured with method eagle",
        ),
        (
            '{"method": "mlp_speculator", "num_speculative_tokens": 1}',
            "no method 'mlp_speculator' here; methods: ngram, s",
        ),
        ('{"method": "foo_mtp", "num_speculative_tokens": 1}', "no method 'foo_mtp' here"),
        ('{"method": "mtp"}', "needs num_speculative_tokens"),
        ('{"method": "mtp", "num_speculative_tokens": 1, "revision": "main"}', "revision is that of model"),
        ('{"method": "mtp", "num_speculative_tokens": 1, "draft_tensor_parallel_size": 2}', "size must be 1"),
        ('{"method": "mtp", "num_speculative_tokens": 32}', "mtp: k must be 1 to 31, got 32"),
        ('{"method": "mtp", "num_speculative_tokens": 1, "index_share_for_mtp_iteration": true}', "cannot be honoured"),
        ('{"method": "medusa", "num_speculative_tokens": 3}', "method medusa needs model, the folder"),
        ('{"method": "dflash", "model": "x"}', "needs num_speculative_tokens"),
        (
            '{"method": "dspark", "model": "x", "num_speculative_tokens": 7, "dspark_draft_topk": 4}',
            "cannot be honoured",
        ),
        ('{"model": "x", "num_speculative_tokens": 7, "revision": 4}', "revision must be a branch, tag or commit"),
        ('{"method": ["ngram"], "num_speculative_tokens": 1}', "no method"),
        ('{"num_speculative_tokens": 5}', "neither method nor model; methods: ngram, suffix, draft_model"),
        ('{"method": "ngram"}', "needs num_speculative_tokens"),
        ('{"model": "small"}', "needs num_speculative_tokens"),
        ('{"method": "draft_model", "num_speculative_tokens": 5}', "method draft_model needs model"),
        (
            '{"model": "small", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 2}',
            "draft_tensor_parallel_size must be 1",
        ),
        ('{"model": "small", "num_speculative_tokens": 5, "quantization": "fp8"}', "'quantization' cannot be honoured"),
        ('{"method": "ngram", "model": "small", "num_speculative_tokens": 5}', "'model' cannot be honoured"),
        (
            '{"method": "suffix", "prompt_lookup_max": 4}',
            "'prompt_lookup_max' cannot be honoured with method suffix; leave it out, or use: method, num_spec",
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": "5"}',
            "num_speculative_tokens must be a whole number, got '5'",
        ),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "prompt-lookup: k must be 1 to 256, got 0"),
        ('{"method": "suffix", "suffix_decoding_min_token_prob": "a"}', "suffix: min_prob must be a number, got 'a'"),
        ('{"method": "ngram", "num_speculative_tokens": 5,}', "not JSON: .* at line 1, column 4[0-9], near"),
        ("ngram", "not JSON: .* line 1, column 1"),
        ("[1]", "must be a JSON object, got list"),
        ("null", "must be a JSON object, got NoneType"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(config, message):
    with pytest.raises(ConfigError, match=message):
        from_vllm(config)
