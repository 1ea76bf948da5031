"""The plan against what engines really hold on the CPU: weights, caches, tables, and the peaks of passes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from held_tensors import held_bytes, peak_bytes, tensors_of

sys.path.append(str(Path(__file__).parents[1] / "models"))

from tiny_models import MODELS, save

from outrider.checkpoints.demo import demo_folder
from outrider.drafters.registry import parse_drafter
from outrider.llm import LLM
from outrider.models.heads.block import BlockHead
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.save import TargetFacts, write_head
from outrider.models.load import load_decoder, read_config
from outrider.native.library import library
from outrider.plan.facts import read_facts
from outrider.plan.forecast import PlanOptions, make_forecast
from outrider.plan.weights import Format, decoder_weights
from outrider.testing.synthetic import synthetic_pair

MEMORY = 8 << 30
SHAPE = {
    "model_type": "qwen2",
    "vocab_size": 2000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 1024,
}


@pytest.fixture(params=["1", "0"], ids=["native", "torch"])
def blocks(request, monkeypatch):
    """Whether packed weights are held by the CPU kernels."""
    monkeypatch.setenv("OUTRIDER_NATIVE", request.param)
    if request.param == "1" and library() is None:
        pytest.skip("no compiler for the CPU kernels")
    return request.param == "1"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Folders of a target and a draft."""
    made = synthetic_pair(SHAPE, layers=2, seed=1)
    return made.save(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int4", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_of_every_family_in_every_form(name, form, blocks, tmp_path):
    save(name, tmp_path)
    config = read_config(tmp_path)
    assert config is not None
    packed = form if form.startswith("int") else None
    dtype = torch.float32 if packed else getattr(torch, form)
    decoder = load_decoder(tmp_path, device="cpu", dtype=None if packed else dtype, quantize=packed)
    planned = decoder_weights(read_facts(str(tmp_path)), config, Format("cpu", dtype, packed, blocks))
    held = held_bytes(decoder.weights)
    # such small models hold their norms twice, and are padded to 16 rows
    assert 0.96 * planned <= held <= 1.06 * planned


@pytest.mark.parametrize("quantize", ["none", "int4", "int8"])
@pytest.mark.parametrize("drafter", ["none", "suffix", "draft-model", "head"])
def test_what_an_engine_holds_at_start(drafter, quantize, blocks, pair, tmp_path):
    target, draft = map(str, pair)
    spec = {"draft-model": f"draft-model:model={draft},k=3"}.get(drafter, drafter)
    if drafter == "head":
        spec = f"block:model={_save_head(target, tmp_path / 'head')}"
    options = {"context": 512, "max_batch": 4, "quantize": quantize, "device": "cpu"}
    plan = make_forecast(target, spec, PlanOptions(memory=MEMORY, **options))
    assert plan.fits
    llm = LLM(target, drafter=parse_drafter(spec), adaptive=False, threads=1, **options)
    assert plan.tokens == llm.loaded.target.pool.count * 16
    assert held_bytes(llm) == pytest.approx(plan.at_start - plan.own, rel=0.05)


def block_config(vocab_size: int) -> HeadConfig:
    """Of a head for the target of `pair`."""
    return HeadConfig(
        kind="block",
        vocab_size=vocab_size,
        hidden_size=256,
        target_hidden_size=256,
        taps=(0, 3),
        layers=2,
        heads=8,
        kv_heads=2,
        head_dim=32,
        intermediate_size=512,
        max_positions=1024,
        block_size=5,
        own_mask=True,
        draft_vocab_size=500,
    )


def _save_head(target: str, folder: Path) -> Path:
    decoder = load_decoder(Path(target), device="cpu")
    config = block_config(decoder.config.vocab_size)
    head = BlockHead(config, decoder)
    write_head(folder, config, head.state_dict(), TargetFacts("t", decoder.config), tokens=4, dtype=torch.float32)
    return folder


def test_the_peak_of_serving(pair):
    """Sampled, with a whole batch and drafts of all sequences: the most that is alive at once."""
    target, draft = map(str, pair)
    options = {"context": 512, "max_batch": 8, "device": "cpu"}
    spec = f"draft-model:model={draft},k=7"
    plan = make_forecast(target, spec, PlanOptions(memory=MEMORY, **options))
    llm = LLM(target, drafter=spec, adaptive=False, threads=1, **options)
    held = held_bytes(llm)
    prompts = [[(7 * i + k) % 1000 + 300 for k in range(200)] for i in range(8)]

    def serve():
        llm.generate(prompts, max_tokens=12, temperature=1.0, ignore_eos=True, seed=1, progress=False)

    peak = held + peak_bytes(serve)
    assert peak == pytest.approx(plan.peak - plan.own, rel=0.05)
    assert plan.peak > plan.at_start


@pytest.mark.skipif(demo_folder() is None, reason="the demo model is not installed")
@pytest.mark.parametrize("quantize", ["auto", "none"])
def test_the_demo_model(quantize, blocks):
    options = {"context": 1024, "max_batch": 2, "quantize": quantize, "device": "cpu"}
    plan = make_forecast("demo", "suffix", PlanOptions(memory=MEMORY, **options))
    llm = LLM("demo", drafter="suffix", adaptive=False, threads=1, **options)
    assert held_bytes(llm) == pytest.approx(plan.at_start - plan.own, rel=0.02)


def test_the_cache_of_a_small_machine_is_a_quarter_of_what_is_left(pair, monkeypatch):
    target = str(pair[0])
    monkeypatch.setattr("outrider.loading.load.available_memory", lambda: 4 << 20)
    llm = LLM(target, drafter="none", device="cpu", max_batch=64, threads=1)
    facts = read_facts(target)
    config = facts.decoder()
    assert config is not None
    weights = decoder_weights(facts, config, Format("cpu", torch.float32))
    plan = make_forecast(target, "none", PlanOptions(memory=weights + (4 << 20), device="cpu", max_batch=64))
    assert abs(plan.tokens - llm.loaded.target.pool.count * 16) <= 16


@pytest.mark.parametrize("rows", [256, 512])
def test_the_buffers_of_captured_passes(pair, rows):
    """They are made of the same tensors on every device."""
    pytest.importorskip("triton")
    from outrider.kvcache.pages import PagePool
    from outrider.plan.estimate import buffer_bytes
    from outrider.runners.graphed_forward import ActivationBuffers
    from outrider.runners.paged_model import PagedModel

    decoder = load_decoder(Path(pair[0]), device="cpu", dtype=torch.bfloat16)
    model = PagedModel(decoder, PagePool(4), 512)
    made = held_bytes(list(vars(ActivationBuffers(model, rows)).values()))
    assert buffer_bytes(decoder.config, rows, 2) == pytest.approx(made, rel=0.02)


def test_the_activations_of_captured_prompts(pair, monkeypatch):
    """The launches allocate the same on every device; here the kernels among them do nothing."""
    pytest.importorskip("triton")
    from outrider.kvcache.pages import PagePool
    from outrider.plan.estimate import captured_row_bytes
    from outrider.runners import graphed_prompt
    from outrider.runners.paged_model import PagedModel
    from outrider.runners.threads import use_threads

    for name in ("rotate_and_store", "attend_prompt", "gate_rows", "norm_rows"):
        monkeypatch.setattr(graphed_prompt, name, lambda *given, **named: None)
    decoder = load_decoder(Path(pair[0]), device="cpu", dtype=torch.float32)
    model, rows = PagedModel(decoder, PagePool(4), 512), 256
    prompt = graphed_prompt.GraphedPrompt(model, graphed_prompt.PromptBuffers(model, rows), rows)
    # products of bfloat16 take room of their own on a CPU that has none, and so do those of several threads
    with use_threads(1):
        taken = peak_bytes(prompt.run)
    assert taken == pytest.approx(rows * captured_row_bytes(decoder.config, 4), rel=0.03)


def test_what_the_fused_kernels_hold_of_a_block_head(pair, tmp_path):
    """Copies of matrices, parts of split products, and rotations: the same tensors on every device."""
    pytest.importorskip("triton")
    from outrider.kvcache.pages import PagePool
    from outrider.plan.estimate import SPLIT_BYTES, fused_copies
    from outrider.runners.attention import AttentionLayers
    from outrider.runners.fused_block import FusedBlock
    from outrider.runners.paged_model import PagedModel

    decoder = load_decoder(Path(pair[0]), device="cpu", dtype=torch.bfloat16)
    config = block_config(decoder.config.vocab_size)
    head = BlockHead(config, decoder).bfloat16()
    model = PagedModel(decoder, PagePool(4), 512)
    made = FusedBlock(head, model, AttentionLayers([], [0, 0], head.scale))
    own = tensors_of([head, model, made.head.output_head()])
    held = sum(size for place, size in tensors_of(made).items() if place not in own)
    table = (512 + 128) * config.head_dim * 4
    assert held == pytest.approx(fused_copies(config) * 2 + SPLIT_BYTES + table, rel=0.02)
