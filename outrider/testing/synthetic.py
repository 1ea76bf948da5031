"""A target and a draft model of a real shape with random weights: times are real, text is not.

The outputs of the target's layers beyond the draft's are scaled by `epsilon`, which determines how
often the two models agree. For measuring speed without real weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.errors import ConfigError
from outrider.core.sequence import Span
from outrider.models.config import DecoderConfig
from outrider.models.decoder import Decoder, Layer, Norm, Weights
from outrider.models.families import FAMILIES, parse_config
from outrider.models.fields import UnsupportedModel
from outrider.models.linear import Linear
from outrider.models.tokenizer import Tokenizer
from outrider.runners.native import NativeRunner
from outrider.testing.synthetic_checkpoint import EOS, byte_tokenizer, save_decoder

ModelShape = str | Mapping[str, Any]
"""A name in SHAPES, or the contents of a config.json."""

_LLAMA_3: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": _LLAMA_3
    | {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    "llama-1b": _LLAMA_3
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64},
    "smollm2-135m": _LLAMA_3
    | {"vocab_size": 49_152, "max_position_embeddings": 8192, "rope_theta": 100_000.0, "tie_word_embeddings": True}
    | {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    | {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
    "qwen-1.5b": {"model_type": "qwen2", "vocab_size": 151_936, "max_position_embeddings": 32_768}
    | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "rms_norm_eps": 1e-6}
    | {"num_attention_heads": 12, "num_key_value_heads": 2, "rope_theta": 1e6, "tie_word_embeddings": True},
    "qwen-0.5b": {"model_type": "qwen2", "vocab_size": 151_936, "max_position_embeddings": 32_768}
    | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "rms_norm_eps": 1e-6}
    | {"num_attention_heads": 14, "num_key_value_heads": 2, "rope_theta": 1e6, "tie_word_embeddings": True},
    "tiny": _LLAMA_3
    | {"vocab_size": 512, "max_position_embeddings": 4096, "rope_theta": 10_000.0}
    | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
}
FULL_AGREEMENT_EPSILON = 2.0**-60
"""epsilon of agreement 1: the added layers vanish in rounding, while their weights stay random numbers, not zeros."""
GAIN = 2.0
"""Standard deviation of the logits. With tied embeddings, above about 3 one token repeats for ever."""
SAMPLES = 128  # vocabularies drawn to find the correlation of an agreement


@dataclass(frozen=True, slots=True)
class SyntheticPair:
    """Two decoders that share embedding, first layers, final norm and head: the same tensors, no copies."""

    target: Decoder
    draft: Decoder
    tokenizer: Tokenizer
    config_json: Mapping[str, Any]
    """The target's, as a config.json would say it; the draft's differs in num_hidden_layers."""
    epsilon: float

    def save(self, folder: Path) -> tuple[Path, Path]:
        """Write both as Hugging Face folders, `target` and `draft`, and return their paths."""
        paths = folder / "target", folder / "draft"
        for path, decoder in zip(paths, (self.target, self.draft), strict=True):
            save_decoder(decoder, self.config_of(decoder), path)
        return paths

    def config_of(self, decoder: Decoder) -> dict[str, Any]:
        """The config.json of one of the two."""
        return dict(self.config_json) | {"num_hidden_layers": len(decoder.config.layers)}


def synthetic_pair(
    shape: ModelShape,
    layers: int = 2,
    agreement: float = 1.0,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    frequent: int = 0,
    coverage: float = 0.98,
) -> SyntheticPair:
    """A target of this shape with random weights, and a draft made of its first `layers` layers.

    agreement: how often the draft's best token is the target's, above 0 and at most 1. Below 1 it
    is approximate (see `epsilon_for`); `measured_agreement` measures it. dtype None is float32 on
    the CPU and bfloat16 elsewhere. Weights are drawn on the device. frequent: see `rare_tokens`;
    0 makes all tokens equally frequent.
    """
    device = torch.device(device)
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    config_json = _config_json(shape, dtype)
    config = _synthetic_config(config_json)
    if not 1 <= layers < len(config.layers):
        raise ConfigError(f"layers must be 1 to {len(config.layers) - 1}, fewer than the target's; got {layers}")
    epsilon = epsilon_for(agreement, config, layers, device)
    weights = _WeightSampler(config, device, dtype, seed).weights(
        [1.0] * layers + [epsilon] * (len(config.layers) - layers)
    )
    if frequent:
        cast(Linear, weights.head).weight[frequent:] *= rare_logit_scale(frequent, config.vocab_size, coverage)
    shared = Weights(weights.embedding, weights.layers[:layers], weights.norm, weights.head)
    small = _synthetic_config(config_json | {"num_hidden_layers": layers})
    tokenizer = byte_tokenizer(config.vocab_size)
    return SyntheticPair(
        Decoder(config, weights, dtype), Decoder(small, shared, dtype), tokenizer, config_json, epsilon
    )


def epsilon_for(agreement: float, config: DecoderConfig, layers: int, device: torch.device | str = "cpu") -> float:
    """The scale of the later layers' outputs for which the draft's best token is the target's this often.

    All layers add about equally to the residual stream, in independent directions. So with n layers
    in the draft and m beyond, draft and target logits correlate by c = 1 / sqrt(1 + epsilon^2 m / n).
    c is found by drawing pairs of normal logits and counting equal argmaxes.
    """
    if not 0 < agreement <= 1:
        raise ConfigError(f"agreement must be above 0 and at most 1, got {agreement}")
    if agreement == 1:
        return FULL_AGREEMENT_EPSILON
    generator = torch.Generator(device).manual_seed(1)
    first, second = (torch.randn(SAMPLES, config.vocab_size, generator=generator, device=device) for _ in range(2))
    best = first.argmax(-1)
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        share = float((first * middle + second * math.sqrt(1 - middle**2)).argmax(-1).eq(best).float().mean())
        low, high = (middle, high) if share < agreement else (low, middle)
    correlation = (low + high) / 2
    return math.sqrt(1 / correlation**2 - 1) * math.sqrt(layers / (len(config.layers) - layers))


@contextmanager
def rare_tokens(pair: SyntheticPair, frequent: int, coverage: float = 0.98) -> Iterator[None]:
    """While the block runs, tokens from `frequent` on are the best at only 1 - coverage of positions, in both models.

    As in real text, where most of the vocabulary is rare: for measuring a draft's reduced head (`vocab`). Tokens are of
    these two kinds only. The pair's head is changed in place.
    """
    rare = cast(Linear, pair.target.weights.head).weight[frequent:]
    before = rare.clone()
    rare *= rare_logit_scale(frequent, pair.target.config.vocab_size, coverage)
    try:
        yield
    finally:
        rare.copy_(before)


def rare_logit_scale(frequent: int, vocab_size: int, coverage: float) -> float:
    """The factor on the logits from `frequent` on for which the best token lies below them this often.

    Logits of random rows are independent and normal. Where u is uniform, the best of n is the point x
    below which one of them lies with probability u^(1/n); the m others, scaled by s, all lie below it
    with probability Phi(x / s)^m.
    """
    rare = vocab_size - frequent
    if rare <= 0:
        return 1.0
    if frequent < 1 or not frequent / vocab_size <= coverage < 1:
        raise ConfigError(
            f"coverage must be at least frequent / vocabulary ({frequent} / {vocab_size}) and below 1, got {coverage}"
        )
    u = (torch.arange(SAMPLES**2, dtype=torch.float64) + 0.5) / SAMPLES**2
    best = torch.special.ndtri(u ** (1 / frequent))
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        share = float((rare * torch.special.log_ndtr(best / middle)).exp().mean())
        low, high = (middle, high) if share > coverage else (low, middle)
    return (low + high) / 2


@torch.inference_mode()
def measured_agreement(pair: SyntheticPair, *, texts: int = 4, length: int = 96, seed: int = 0) -> float:
    """The share of positions in random sequences at which the draft's best token is the target's."""
    generator = torch.Generator().manual_seed(seed)
    shape = (texts, length)
    ids = torch.randint(EOS + 1, pair.target.config.vocab_size, shape, generator=generator).tolist()
    best: list[Tensor] = []
    for decoder in (pair.target, pair.draft):
        target = NativeRunner(decoder, texts * (length + 16), context=length)
        spans = [Span(i, 0, (text[0],), Draft(tuple(text[1:]))) for i, text in enumerate(ids)]
        for span, text in zip(spans, ids, strict=True):
            target.pool.open(span.seq_id, text, str(span.seq_id))
            target.pool.reserve(span.seq_id, length)
        best.append(target.score(spans).logits.argmax(-1))
    return float((best[0] == best[1]).float().mean())


def weight_bytes(decoder: Decoder) -> int:
    """Bytes of weights that one forward pass reads: every matrix and the head, without the embedding."""
    products = [p for layer in decoder.weights.layers for p in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    return sum(cast(Linear, product).weight.nbytes for product in (*products, decoder.weights.head))


@dataclass(slots=True)
class _WeightSampler:
    """Draws random weights on the device, in the order of the model."""

    config: DecoderConfig
    device: torch.device
    dtype: torch.dtype
    seed: int
    _generator: torch.Generator | None = None

    def weights(self, strengths: list[float]) -> Weights:
        """strengths: the scale of each layer's output."""
        config = self.config
        self._generator = torch.Generator(self.device).manual_seed(self.seed)
        embedding = self._matrix(config.vocab_size, config.hidden_size, GAIN)
        layers = [self._layer(strength) for strength in strengths]
        head = embedding if config.tied else self._matrix(config.vocab_size, config.hidden_size, GAIN)
        return Weights(embedding, layers, self._norm(), Linear(head))

    def _layer(self, strength: float) -> Layer:
        config = self.config
        hidden, wide, q = config.hidden_size, config.intermediate_size, config.heads * config.head_dim
        rows = q + 2 * config.kv_heads * config.head_dim
        return Layer(
            attention_norm=self._norm(),
            qkv=Linear(self._matrix(rows, hidden), self._normal(rows) * 0.1 if config.qkv_bias else None),
            out=Linear(self._matrix(hidden, q, strength)),
            mlp_norm=self._norm(),
            gate_up=Linear(self._matrix(2 * wide, hidden)),
            down=Linear(self._matrix(hidden, wide, strength)),
        )

    def _matrix(self, rows: int, columns: int, strength: float = 1.0) -> Tensor:
        return self._normal(rows, columns).mul_(strength * columns**-0.5)

    def _normal(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(generator=self._generator)

    def _norm(self) -> Norm:
        """Between 0.75 and 1.25, rounded to the model's dtype, so that a checkpoint holds the same weight."""
        weight = torch.empty(self.config.hidden_size, device=self.device).uniform_(
            0.75, 1.25, generator=self._generator
        )
        return Norm(weight.to(self.dtype).float(), self.config.norm_eps, self.dtype)


def _config_json(shape: ModelShape, dtype: torch.dtype) -> dict[str, Any]:
    if isinstance(shape, str) and shape not in SHAPES:
        raise ConfigError(f"no shape called {shape!r}; choose one of: {', '.join(SHAPES)}")
    given = dict(SHAPES[shape] if isinstance(shape, str) else shape)
    family = FAMILIES.get(str(given.get("model_type")))
    named = {"architectures": [family.architecture]} if family else {}
    ids = {"bos_token_id": None, "eos_token_id": EOS, "pad_token_id": None}
    return named | given | ids | {"dtype": str(dtype).removeprefix("torch.")}


def _synthetic_config(config_json: Mapping[str, Any]) -> DecoderConfig:
    try:
        config = parse_config(config_json)
    except UnsupportedModel as reason:
        raise ConfigError(f"the native decoder has no such shape: {reason}") from reason
    if config.qk_norm or config.sandwich_norms or config.out_bias or config.mlp_bias or config.unit_offset:
        raise ConfigError(f"synthetic weights are drawn for Llama-like and Qwen2 shapes, not {config.model_type}")
    return config
