"""Tiny random models of real families, saved by Transformers, loaded by the package, judged by Transformers."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from plain_decoding import World
from testbed import CONTEXT, EOS, TOKENIZER, VOCAB, Testbed
from torch import Tensor
from transformers import (
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.utils import logging

from outrider.core.sampling import Token
from outrider.core.sequence import Span
from outrider.models.load import load_decoder
from outrider.runners.base import Runner
from outrider.runners.fallback import FallbackRunner
from outrider.runners.native import NativeRunner

logging.disable_progress_bar()

_IDS: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": EOS, "pad_token_id": None}
_SIZES: dict[str, Any] = _IDS | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, _SIZES),
    "llama-deep": (LlamaConfig, _SIZES | {"num_hidden_layers": 4}),
    "qwen2": (Qwen2Config, {key: value for key, value in _SIZES.items() if key != "head_dim"}),
    "qwen3": (Qwen3Config, _SIZES),
    "mistral": (MistralConfig, _SIZES | {"sliding_window": 24}),
    "gemma2": (Gemma2Config, _SIZES | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 20}),
    "gpt2": (GPT2Config, _IDS | {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": CONTEXT}),
    "mamba": (MambaConfig, _IDS | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
}
SPREAD = 1.5
"""Matrices are drawn this many times wider than is usual for their size, so that the model has opinions."""


def make_model(family: str, seed: int = 0) -> Any:
    """A random Transformers model in float32, the same for the same seed."""
    torch.manual_seed(seed)
    config, options = CONFIGS[family]
    model = AutoModelForCausalLM.from_config(config(**options), attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() == 2 and "A_log" not in name:
                weight.normal_(0, SPREAD / weight.shape[-1] ** 0.5, generator=generator)
            elif name.endswith(("norm.weight", "proj.bias")) and family != "mamba":
                weight += torch.randn(weight.shape, generator=generator) * 0.3
    return model


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def transformers_world(model: Any) -> World:
    """Judged by a full forward of the Transformers model for every token."""

    @torch.inference_mode()
    def logits_after(tokens: Seq[Token]) -> Tensor:
        return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1].float()

    return World(logits_after, TOKENIZER, TOKENIZER.eos_ids, CONTEXT)


def whole_text_world(fresh: Callable[[], Runner]) -> World:
    """Judged by a full pass of the same packed model over the whole text, on a cache used once."""

    def logits_after(tokens: Seq[Token]) -> Tensor:
        target = fresh()
        target.pool.open(0, tokens)
        target.pool.reserve(0, len(tokens))
        return target.score([Span(0, 0, tuple(tokens))]).logits[0]

    return World(logits_after, TOKENIZER, TOKENIZER.eos_ids, CONTEXT)


@cache
def native_testbed(
    family: str, *, quantize: Literal["int4", "int8"] | None = None, poison: Token | None = None
) -> Testbed:
    """The native target on a tiny model, in float32 or packed; reading the token `poison` makes it say NaN.

    The same one for every test of a process, so that each text is judged once.
    """
    models = {"draft": make_model(family), "other": make_model(family, seed=1)}
    if poison is not None:
        with torch.no_grad():
            models["draft"].get_input_embeddings().weight[poison] = float("nan")
    with TemporaryDirectory() as folder:
        decoders = {
            name: load_decoder(save(model, Path(folder) / name), device="cpu", quantize=quantize)
            for name, model in models.items()
        }

    def target(cache_tokens: int) -> NativeRunner:
        return NativeRunner(decoders["draft"], cache_tokens)

    world = transformers_world(models["draft"]) if quantize is None else whole_text_world(lambda: target(CONTEXT))
    decoders["cramped"] = decoders["other"]
    return Testbed(world, target, lambda name: NativeRunner(decoders[name], 64 if name == "cramped" else 2048))


def fallback_testbed(family: str, folder: Path) -> Testbed:
    """The Transformers-backed target on a tiny model."""
    model = make_model(family)
    save(model, folder)
    device = torch.device("cpu")

    def target(cache_tokens: int) -> FallbackRunner:
        return FallbackRunner.load(folder, device=device, dtype=torch.float32, cache_tokens=cache_tokens)

    return Testbed(transformers_world(model), target, lambda _: target(2048))
