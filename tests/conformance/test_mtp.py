"""MTP modules: their drafts are those of the published recipes, and the text stays the target's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance_models import make_model, save, transformers_world
from mtp_reference import MtpReference
from plain_decoding import assert_same, plain, request, run
from safetensors.torch import load_file, save_file
from testbed import CONTEXT, TOKENIZER, VOCAB
from tiny_mtp import mtp_tensors, names_of, save_mtp

from outrider.core.errors import ConfigError
from outrider.drafters.base import DrafterContext
from outrider.drafters.mtp import MtpConfig
from outrider.drafters.registry import parse_drafter
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits
from outrider.llm import LLM, _models_loaded
from outrider.loading.load import LoadedModel
from outrider.loading.memory import reserved_memory_of
from outrider.models.load import load_decoder, read_config
from outrider.runners.native import NativeRunner
from outrider.testing.toy import ToyRunner
from outrider.verify.base import make_verifier
from outrider.verify.noise import gumbel

MIMO = {  # as published, beside the sizes
    "architectures": ["MiMoForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"},
    "model_type": "mimo",
    "attention_bias": True,
    "num_nextn_predict_layers": 1,
    "use_mrope": False,
    "use_sliding_window": False,
}
FAMILIES = {"deepseek": "llama-deep", "qwen": "qwen3", "mimo": "qwen2"}
"""The family of the target under test with a module of each layout."""


@dataclass(frozen=True)
class Case:
    layout: str
    model: Any
    """Transformers' model."""
    folder: Path
    """The checkpoint: the model with its module; for Qwen's layout the model alone."""
    module: str
    """Option model of the drafter."""
    reference: MtpReference

    def target(self) -> NativeRunner:
        return NativeRunner(load_decoder(self.folder, device="cpu"), 4096)

    def engine(self, **options: Any) -> Engine:
        target = self.target()
        context = DrafterContext(vocab_size=VOCAB, context=CONTEXT, target=target, target_folder=self.folder)
        drafter = MtpConfig(model=self.module, **options).build(context)
        limits = EngineLimits(max_batch=3, max_round_tokens=25)
        return Engine(target, drafter, make_verifier("seeded"), TOKENIZER, eos_ids=TOKENIZER.eos_ids, limits=limits)


def make_case(layout: str, folder: Path) -> Case:
    model = make_model(FAMILIES[layout])
    save(model, folder)
    target = read_config(folder)
    assert target is not None
    beside, module = folder, ""
    own = json.loads((folder / "config.json").read_text())
    more: dict[str, Any] = own | {"num_nextn_predict_layers": 1}
    if layout == "mimo":
        more = own | MIMO
    if layout == "qwen":  # no such target is native: the module is another checkpoint's
        beside = folder / "module"
        module, more = str(beside), {"model_type": "qwen3_next", "attn_output_gate": False}
    tensors = save_mtp(beside, layout, target, more)
    return Case(layout, model, folder, module, MtpReference(layout, tensors, model, target.head_dim))


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(request.param, tmp_path_factory.mktemp(request.param))


def prompts() -> list[list[int]]:
    """Of one token, of several pages, and two with the same beginning."""
    shared = [i % (VOCAB - 1) + 1 for i in range(37)]
    return [[7], [i * 7 % VOCAB for i in range(45)], [*shared, 3], [*shared, 5, 6]]


def test_drafts_are_those_of_the_recipe_over_the_whole_text(case: Case):
    """Batched, through pages, in chunks and with prefix hits, against float64 without a cache."""
    tried, checked = case.engine(k=4), 0
    propose = tried.drafter.propose

    def checking(view: Any) -> Any:
        nonlocal checked
        drafts = propose(view)
        for seq, draft in zip(view.seqs, drafts or (), strict=True):
            if len(seq.tokens) < 2:
                continue
            path: list[int] = []
            for token in draft.tokens:
                row = case.reference.logits(list(seq.tokens), path)
                if seq.params.temperature:
                    row = row / seq.params.temperature + gumbel(seq.seed, len(seq.tokens) + len(path), VOCAB)
                best, second = row.topk(2).values.tolist()
                if best - second < 1e-4:  # float32 may see it otherwise
                    break
                assert token == int(row.argmax())
                path.append(token)
                checked += 1
        return drafts

    tried.drafter.propose = checking  # type: ignore[method-assign]
    for temperature in (0.0, 0.8):
        run(tried, [request(p, max_tokens=12, ignore_eos=True, temperature=temperature, seed=4) for p in prompts()])
    assert checked > 100
    assert tried.stats.shared_tokens > 0
    assert tried.stats.draft_failures == 0


@pytest.mark.parametrize("options", [{"k": 3}, {"tree": 7, "depth": 3, "top_k": 3}], ids=["chain", "tree"])
def test_texts_are_plain_decodings(case: Case, options: dict[str, int]):
    """Judged by Transformers: MiMo's target by Qwen2, whose numbers it has."""
    world = transformers_world(case.model)
    tried = case.engine(**options)
    asked = [request(p, max_tokens=20, temperature=0.5 * i, seed=i, logprobs=1) for i, p in enumerate(prompts())]
    for told, each in zip(run(tried, asked), asked, strict=True):
        assert_same(told, plain(world, each), tolerance=1e-4)
    tried.check()
    assert tried.stats.all.drafted > 20
    assert tried.stats.draft_failures == 0


def test_a_loaded_model_drafts_with_its_own_module(tmp_path: Path):
    case = make_case("mimo", tmp_path)
    loaded = LoadedModel("mimo", tmp_path, case.target(), TOKENIZER, "float32")  # pyright: ignore[reportArgumentType]
    options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "temperature": 0.0}
    plain_text, drafted = (
        LLM(loaded, drafter=name, adaptive=False).generate(prompts()[2], **options) for name in ("none", "mtp")
    )
    assert drafted.token_ids == plain_text.token_ids
    assert drafted.stats.all.drafted > 20


def test_what_a_drafter_loads_of_the_targets_checkpoint_goes_by_its_name():
    loads = [_models_loaded(parse_drafter("suffix+mtp"), "org/name@old", revision) for revision in (None, "new")]
    assert [(each.model, each.module) for (each,) in loads] == [("org/name@old", True), ("org/name@new", True)]


def test_several_modules_are_the_first_again_and_again(tmp_path: Path):
    """The tensors of a second module change nothing."""
    case = make_case("deepseek", tmp_path)
    first = [told.tokens for (told,) in run(case.engine(k=3), [request(prompts()[1], max_tokens=9)])]
    before = case.engine(k=3).drafter.head.state_dict()
    layers = len(case.model.model.layers)
    old, new = (names_of("deepseek", layers + i)["layer"] for i in range(2))
    target = read_config(tmp_path)
    assert target is not None
    second = {name.replace(old, new): tensor for name, tensor in mtp_tensors("deepseek", target, seed=1).items()}
    save_file(second, tmp_path / "mtp-2.safetensors")
    after = case.engine(k=3).drafter.head.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [told.tokens for (told,) in run(case.engine(k=3), [request(prompts()[1], max_tokens=9)])] == first


def test_fastmtp_reads_what_the_targets_head_reads(tmp_path: Path):
    """Tencent's training of MiMo's module feeds it the hidden state behind the final norm."""
    case = make_case("mimo", tmp_path)
    features = torch.randn(3, case.target().model.decoder.config.hidden_size)
    head = case.engine().drafter.head
    assert torch.equal(head.fuse(features), features)
    config = json.loads((tmp_path / "config.json").read_text())
    steps = {"num_speculative_steps": 3, "mtp_loss_step_weights": [0.5, 0.3, 0.2], "mtp_loss_weight": 1.0}
    (tmp_path / "config.json").write_text(json.dumps(config | steps))
    with torch.inference_mode():
        expected = case.model.model.norm(features)
    assert torch.allclose(case.engine().drafter.head.fuse(features), expected, atol=1e-5)


def test_tensors_beyond_the_targets_layers_need_a_module(tmp_path: Path):
    """A layer that config.json does not count is still an error."""
    case = make_case("deepseek", tmp_path)
    tensors = load_file(tmp_path / "mtp.safetensors")
    projection = names_of("deepseek", len(case.model.model.layers))["fc"]
    save_file({name: each for name, each in tensors.items() if projection not in name}, tmp_path / "mtp.safetensors")
    with pytest.raises(ConfigError, match=r"model.layers.4.* has no place in the model"):
        case.target()


def test_memory_is_that_of_the_module_or_of_the_whole_model(tmp_path: Path):
    case = make_case("mimo", tmp_path)
    config = case.target().model.decoder.config
    module = reserved_memory_of(str(tmp_path), module=True)
    assert module.weights == 2 * sum(each.numel() for each in case.reference.weights.values())
    kv = 2 * config.kv_heads * config.head_dim
    assert module.bytes_per_token == 2 * (kv + config.hidden_size) + 8  # the target's last layer, and a token
    assert reserved_memory_of(str(tmp_path)).bytes_per_token == 2 * kv * len(config.layers)


def rewritten(folder: Path, rename: dict[str, tuple[str, int]]) -> None:
    """Give tensors of the module other names, and so many times their rows."""
    tensors = load_file(folder / "mtp.safetensors")
    for old, (new, times) in rename.items():
        (name,) = [each for each in tensors if each.endswith(old)]
        tensors[name.replace(old, new)] = torch.cat([tensors.pop(name)] * times)
    save_file(tensors, folder / "mtp.safetensors")


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"q_proj.weight": ("q_a_proj.weight", 1)}, "has multi-head latent attention"),
        ({"mlp.up_proj.weight": ("mlp.experts.0.up_proj.weight", 1)}, "has a mixture of experts"),
        ({"q_proj.weight": ("q_proj.weight", 2)}, "has gated attention, and mtp runs layers of plain attention"),
        ({"k_proj.weight": ("k_proj.weight", 2)}, "k_proj.weight has shape"),
        ({"enorm.weight": ("enorms.weight", 1)}, "embedding_norm.weight is missing; .* has no place in the head"),
    ],
)
def test_other_layers_are_refused_by_name(tmp_path: Path, rename: dict[str, tuple[str, int]], message: str):
    case = make_case("deepseek", tmp_path)
    rewritten(tmp_path, rename)
    with pytest.raises(ConfigError, match=message):
        case.engine()


def test_refusals(tmp_path: Path):
    case = make_case("mimo", tmp_path / "mimo")
    other = make_case("deepseek", tmp_path / "other")
    target = case.target()
    context = DrafterContext(vocab_size=VOCAB, context=CONTEXT, target=target)
    with pytest.raises(ConfigError, match="not loaded from a folder"):
        MtpConfig().build(context)
    with pytest.raises(ConfigError, match="made for a target with 4 layers, and this one has 2"):
        MtpConfig(model=str(other.folder)).build(context)
    (case.folder / "mtp.safetensors").unlink()
    with pytest.raises(ConfigError, match="holds no MTP module"):
        MtpConfig(model=str(case.folder)).build(context)
    with pytest.raises(ConfigError, match="mtp reads the layers of its target"):
        MtpConfig().build(DrafterContext(vocab_size=VOCAB, context=CONTEXT, target=ToyRunner()))
    with pytest.raises(ConfigError, match="mtp: tree must be 0 to 31"):
        MtpConfig(tree=32)
