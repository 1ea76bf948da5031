"""Checkpoints of heads: each published layout is recognised, read and refused for what it is."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from published_heads import DIM, HEADS, HIDDEN, KV, LAYERS, PUBLISHED, VOCAB, WIDE, publish
from safetensors.torch import load_file, save_file

from outrider.core.errors import ConfigError
from outrider.loading.memory import reserved_memory_of
from outrider.models.config import DecoderConfig, LayerConfig, RopeConfig
from outrider.models.decoder import Decoder, Norm, Weights
from outrider.models.heads.checkpoint import check_target, kind_of, load_weights, open_head, parse_head_config
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.eagle import load_eagle, make_eagle
from outrider.models.heads.save import TargetFacts, write_head
from outrider.models.linear import Linear

TARGET = DecoderConfig(
    model_type="llama",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=WIDE,
    heads=HEADS,
    kv_heads=KV,
    head_dim=DIM,
    layers=(LayerConfig(),) * LAYERS,
    ropes=(RopeConfig(),),
    max_positions=4096,
    norm_eps=1e-5,
    activation="silu",
    attention_scale=1.0,
)
READ: dict[str, dict[str, Any]] = {
    "eagle1": {"kind": "eagle", "bias": True, "own_embedding": True, "taps": ()},
    "eagle3": {"kind": "eagle3", "draft_vocab_size": 20, "own_head": True, "taps": (), "norm_before_residual": False},
    "eagle3.1": {"kind": "eagle3", "fc_norm": True, "norm_output": True, "taps": (0, 2, 5), "own_head": False},
    "speculators": {"kind": "eagle3", "norm_before_fc": True, "norm_before_residual": True, "taps": (1, 3, 6)},
    "dflash": {"kind": "block", "block_size": 16, "mask_token_id": 7, "taps": (1, 5), "qk_norm": True, "causal": False},
    "jetspec": {"kind": "block", "block_size": 8, "causal": True, "layers": 2, "sample_from_anchor": False},
    "dspark": {"kind": "block", "markov_rank": 5, "sample_from_anchor": True, "taps": (0, 6), "confidence": True},
    "speculators-dspark": {"kind": "block", "taps": (0, 6), "confidence_with_markov": True, "sample_from_anchor": True},
    "medusa": {"kind": "medusa", "medusa_heads": 3, "medusa_layers": 1, "vocab_size": VOCAB, "own_head": True},
    "mtp-deepseek": {"kind": "mtp", "layers": 1, "target_layers": 8, "own_head": False, "own_embedding": False},
    "mtp-qwen": {"kind": "mtp", "layers": 1, "qk_norm": True, "unit_offset": True, "hidden_first": False},
    "mtp-mimo": {"kind": "mtp", "layers": 1, "qkv_bias": True, "hidden_first": True, "raw_hidden": True},
}


def decoder() -> Decoder:
    generator = torch.Generator().manual_seed(1)
    table, head = (torch.randn(VOCAB, HIDDEN, generator=generator) for _ in range(2))
    weights = Weights(table, [], Norm(torch.ones(HIDDEN), 1e-5), Linear(head))
    return Decoder(TARGET, weights, torch.float32)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_layout_is_read_for_what_it_is(name, tmp_path):
    publish(tmp_path, name)
    config = parse_head_config(open_head(str(tmp_path)))
    assert {key: getattr(config, key) for key in READ[name]} == READ[name]
    if config.kind != "medusa":
        sizes = config.hidden_size, config.intermediate_size, config.heads, config.kv_heads, config.head_dim
        assert sizes == (HIDDEN, WIDE, HEADS, KV, DIM)
        assert (config.rope, config.norm_eps, config.vocab_size) == (RopeConfig(theta=500000.0), 1e-5, VOCAB)


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "eagle3.1", "speculators"])
def test_an_eagle_head_has_the_numbers_of_its_file(name, tmp_path):
    stored = publish(tmp_path, name)
    head = load_eagle(str(tmp_path), decoder())
    read = head.state_dict()
    assert read.keys() == {key.replace("midlayer.", "layers.0.") for key in stored} - {"t2d"}
    for key, tensor in stored.items():
        if key != "t2d":
            assert torch.equal(read[key.replace("midlayer.", "layers.0.")], tensor)
    assert (
        head.config.taps == {"eagle1": (7,), "eagle3": (1, 3, 4), "eagle3.1": (0, 2, 5), "speculators": (1, 3, 6)}[name]
    )
    tokens = head.tokens()
    assert name == "eagle1" or (tokens is not None and tokens.tolist() == list(range(3, 43, 2)))


def test_an_embedding_that_is_the_targets_is_not_kept_twice(tmp_path):
    stored = publish(tmp_path, "eagle1")
    target = decoder()
    stored["embed_tokens.weight"] = target.weights.embedding
    save_file(stored, tmp_path / "model.safetensors")
    assert load_eagle(str(tmp_path), target).embed_tokens is None


@pytest.mark.parametrize("missing", [True, False])
def test_what_no_norm_before_residual_means_depends_on_the_layout(missing, tmp_path):
    given = {} if missing else {"norm_before_residual": False}
    publish(tmp_path / "raw", "eagle3", **given)
    publish(tmp_path / "speculators", "speculators", **given)
    assert not parse_head_config(open_head(str(tmp_path / "raw"))).norm_before_residual
    assert parse_head_config(open_head(str(tmp_path / "speculators"))).norm_before_residual is missing


def test_windows_are_those_of_all_layers(tmp_path):
    publish(tmp_path / "one", "eagle3", sliding_window=512, layer_types=["sliding_attention"])
    assert parse_head_config(open_head(str(tmp_path / "one"))).window == 512
    publish(tmp_path / "unused", "dflash", sliding_window=512, use_sliding_window=False)
    assert parse_head_config(open_head(str(tmp_path / "unused"))).window == 0
    publish(tmp_path / "some", "dflash", sliding_window=512, layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(ConfigError, match="only some of its layers have a window"):
        parse_head_config(open_head(str(tmp_path / "some")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 40}, "made for a target with a vocabulary of 50 tokens, and this one has 40"),
        ({"hidden_size": 32}, "made for a target with a hidden size of 16, and this one has 32"),
        ({"layers": (LayerConfig(),) * 5}, "reads layers .1, 3, 6. of its target, and this one has layers 0 to 4"),
    ],
)
def test_a_head_for_another_target_is_refused(change, message, tmp_path):
    publish(tmp_path, "speculators")
    config = parse_head_config(open_head(str(tmp_path)))
    with pytest.raises(ConfigError, match=message):
        check_target(config, replace(TARGET, **change), name="head", kinds=("eagle3",))


def test_a_head_for_so_many_layers_is_refused_elsewhere(tmp_path):
    publish(tmp_path, "dflash")
    config = parse_head_config(open_head(str(tmp_path)))
    with pytest.raises(ConfigError, match="made for a target with 8 layers, and this one has 9"):
        check_target(config, replace(TARGET, layers=(LayerConfig(),) * 9), name="head", kinds=("block",))


@pytest.mark.parametrize(("name", "drafter"), [("dflash", "block"), ("medusa", "medusa"), ("eagle1", "eagle")])
def test_a_head_of_another_kind_says_which_drafter_runs_it(name, drafter, tmp_path):
    publish(tmp_path, name)
    with pytest.raises(ConfigError, match=f"not of kind eagle3; use {drafter}:model="):
        load_eagle(str(tmp_path), decoder(), kinds=("eagle3",))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "x"}, "hidden_size must be a whole number"),
        ({"hidden_size": None}, "hidden_size is not given"),
        ({"speculators_model_type": "mlp"}, "no drafter here reads 'mlp' heads; it reads EAGLE, EAGLE-3"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}},
            "layer ids must be whole numbers from 1 on",
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "all"}}, "layer ids must be"),
        ({"target_hidden_size": 11}, "fc.weight has 48 columns, no multiple of the target's hidden size 11"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope type 'dynamic'"),
    ],
)
def test_a_configuration_that_makes_no_head_is_refused(change, message, tmp_path):
    publish(tmp_path, "eagle3", **change)
    with pytest.raises(ConfigError, match=message):
        parse_head_config(open_head(str(tmp_path)))


def test_tensors_that_do_not_fit_are_named(tmp_path):
    publish(tmp_path / "less", "eagle3", drop="norm.weight")
    with pytest.raises(ConfigError, match=r"norm.weight is missing; download the head again"):
        load_eagle(str(tmp_path / "less"), decoder())
    publish(tmp_path / "other", "eagle3", intermediate_size=25)
    with pytest.raises(ConfigError, match=r"mlp.down_proj.weight has shape \(16, 24\), not \(16, 25\)"):
        load_eagle(str(tmp_path / "other"), decoder())
    stored = publish(tmp_path / "more", "eagle3")
    save_file(stored | {"extra.weight": torch.ones(2)}, tmp_path / "more" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"extra.weight has no place in the head"):
        load_eagle(str(tmp_path / "more"), decoder())
    save_file(stored | {"d2t": torch.full((20,), 40)}, tmp_path / "more" / "model.safetensors")
    with pytest.raises(ConfigError, match="d2t names tokens beyond the target's 50"):
        load_eagle(str(tmp_path / "more"), decoder())
    publish(tmp_path / "whole", "eagle3", drop="d2t")
    with pytest.raises(ConfigError, match="draft_vocab_size is 20 of 50 tokens, and there is no tensor d2t"):
        load_eagle(str(tmp_path / "whole"), decoder())


def test_what_is_no_head_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({"model.layers.0.mlp.gate_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="holds no drafting head"):
        kind_of(open_head(str(tmp_path)))
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ConfigError, match="is not JSON"):
        open_head(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match="not a sound safetensors file"):
        open_head(str(tmp_path))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pickle files .* `safetensors.torch.save_file\("):
        open_head(str(tmp_path))


def random_head(config: HeadConfig) -> Any:
    head, generator = make_eagle(config, decoder()), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for tensor in head.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    if config.draft_vocab_size:
        head.d2t.copy_(torch.arange(config.draft_vocab_size))
    return head


@pytest.mark.parametrize(
    "options",
    [
        {"draft_vocab_size": 20, "norm_before_residual": True, "fc_norm": True, "norm_output": True},
        {"own_head": True, "window": 64, "qk_norm": True, "layers": 2, "norm_before_fc": True},
        {"rope": RopeConfig(kind="llama3", theta=9.0, factor=8.0, original_positions=64, low_freq_factor=2.0)},
        {"rope": RopeConfig(kind="yarn", factor=4.0, original_positions=64, amplitude=1.5, truncate=False)},
    ],
    ids=["reduced", "deep", "llama3", "yarn"],
)
def test_what_is_written_is_read_back(options, tmp_path):
    sizes = {"hidden_size": HIDDEN, "target_hidden_size": HIDDEN, "vocab_size": VOCAB, "target_layers": LAYERS}
    shape = {"heads": HEADS, "kv_heads": KV, "head_dim": DIM, "intermediate_size": WIDE, "max_positions": 4096}
    config = HeadConfig(kind="eagle3", taps=(1, 3, 4), **sizes, **shape, **options)
    head = random_head(config)
    for _ in range(2):  # and again over itself
        facts = TargetFacts("org/target", TARGET)
        write_head(
            tmp_path / "head", config, head.state_dict(), facts, tokens=5, dtype=torch.float32, max_file_bytes=9000
        )
    read = load_eagle(str(tmp_path / "head"), decoder())
    assert read.config == config
    for name, tensor in head.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor)
    assert [each.name for each in tmp_path.iterdir()] == ["head"]
    assert len(list((tmp_path / "head").glob("*.safetensors"))) > 1


def test_the_written_layout_is_that_of_speculators(tmp_path):
    sizes = {"hidden_size": HIDDEN, "target_hidden_size": HIDDEN, "vocab_size": VOCAB, "target_layers": LAYERS}
    shape = {"heads": HEADS, "kv_heads": KV, "head_dim": DIM, "intermediate_size": WIDE}
    config = HeadConfig(kind="eagle3", taps=(1, 3, 4), draft_vocab_size=20, **sizes, **shape)
    head = random_head(config)
    write_head(tmp_path / "head", config, head.state_dict(), TargetFacts("org/target", TARGET), tokens=5)
    written = json.loads((tmp_path / "head" / "config.json").read_text())
    assert written["speculators_model_type"] == "eagle3"
    assert written["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert written["norm_before_residual"] is False
    assert written["draft_vocab_size"] == 20
    assert written["transformer_layer_config"]["num_hidden_layers"] == 1
    told = written["speculators_config"]
    assert told["verifier"] == {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}
    assert told["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 5}]
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert tensors["fc.weight"].dtype is torch.bfloat16
    assert tensors["d2t"].dtype is torch.int64
    assert tensors["t2d"].tolist() == [i % 2 == 0 and i < 40 for i in range(VOCAB)]


def test_a_head_that_cannot_be_written_leaves_the_old_one(tmp_path):
    sizes = {"hidden_size": HIDDEN, "target_hidden_size": HIDDEN, "vocab_size": VOCAB}
    config = HeadConfig(kind="eagle3", taps=(1,), **sizes)
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "kept").touch()
    facts = TargetFacts("org/target", TARGET)
    with pytest.raises(ConfigError, match="eagle heads are read, not written"):
        write_head(tmp_path / "head", replace(config, kind="eagle"), {}, facts, tokens=5)
    assert [each.name for each in (tmp_path / "head").iterdir()] == ["kept"]
    (tmp_path / "file").touch()
    with pytest.raises(Exception, match="cannot be written"):
        write_head(tmp_path / "file" / "head", config, {}, facts, tokens=5)


def test_a_checkpoint_loads_into_its_own_module_alone(tmp_path):
    publish(tmp_path, "eagle3.1")
    files = open_head(str(tmp_path))
    config = check_target(parse_head_config(files), TARGET, name="head", kinds=("eagle3",))
    with pytest.raises(ConfigError, match=r"fc_norm.0.weight has no place"):
        load_weights(make_eagle(replace(config, fc_norm=False), decoder()), files)


def test_memory_for_a_head_is_that_of_its_files_and_its_part_of_every_page(tmp_path):
    stored = publish(tmp_path, "speculators")
    reserved = reserved_memory_of(str(tmp_path))
    file = (tmp_path / "model.safetensors").stat().st_size
    assert file > sum(tensor.nbytes for tensor in stored.values())
    assert reserved.weights == file + 20 * HIDDEN * 2  # and the rows of the target's head that it can draft
    assert reserved.bytes_per_token == 2 * (2 * KV * DIM + 3 * HIDDEN) + 8
