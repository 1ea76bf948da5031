"""A synthetic model's tokenizer, its Hugging Face folder, and Transformers' model of the same weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import tokenizers
import torch
from torch import Tensor

from outrider.core.errors import ConfigError
from outrider.models.decoder import Decoder, Norm
from outrider.models.linear import Linear
from outrider.models.tokenizer import Tokenizer

EOS = 256
"""The end-of-text token: the first id after the bytes."""


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """A token for each byte, an end-of-text token, and a made-up word for every further id."""
    if vocab_size <= EOS:
        raise ConfigError(f"a synthetic vocabulary has at least {EOS + 1} tokens, got {vocab_size}")
    return Tokenizer(_backend(vocab_size), named={"eos_token": "<eos>"})


def save_decoder(decoder: Decoder, config_json: Mapping[str, Any], folder: Path) -> None:
    """Write a decoder of float weights as a Hugging Face folder: config.json, safetensors, tokenizer."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = checkpoint_tensors(decoder)
    if decoder.config.tied:
        del tensors["lm_head.weight"]
    save_file({n: t.to("cpu", copy=True) for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(config_json), indent=1))
    _backend(decoder.config.vocab_size).save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def checkpoint_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """A decoder's weights by their names in a Hugging Face checkpoint; views where that is possible."""
    config, weights = decoder.config, decoder.weights
    tensors = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": _checkpoint_norm(weights.norm, decoder),
        "lm_head.weight": cast(Linear, weights.head).weight,
    }
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    for i, layer in enumerate(weights.layers):
        qkv, gate_up = cast(Linear, layer.qkv), cast(Linear, layer.gate_up)
        gate, up = gate_up.weight.chunk(2)
        own = {
            "input_layernorm.weight": _checkpoint_norm(layer.attention_norm, decoder),
            "post_attention_layernorm.weight": _checkpoint_norm(layer.mlp_norm, decoder),
            "self_attn.o_proj.weight": cast(Linear, layer.out).weight,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": cast(Linear, layer.down).weight,
        }
        for kind, fused in (("weight", qkv.weight), ("bias", qkv.bias)):
            if fused is not None:
                parts = fused.split([q, kv, kv])
                own[f"self_attn.q_proj.{kind}"] = unpair_rows(parts[0], config.head_dim)
                own[f"self_attn.k_proj.{kind}"] = unpair_rows(parts[1], config.head_dim)
                own[f"self_attn.v_proj.{kind}"] = parts[2]
        tensors |= {f"model.layers.{i}.{name}": tensor for name, tensor in own.items()}
    return tensors


def transformers_model(decoder: Decoder, config_json: Mapping[str, Any]) -> Any:
    """Transformers' model on the same weights, mostly in the same memory.

    Make it after any runner that folds norms into the matrices in place (CUDA graphs do).
    Rotary frequencies stay float32.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    config = AutoConfig.for_model(**config_json)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=decoder.dtype)
    model.load_state_dict(checkpoint_tensors(decoder), strict=True, assign=True)
    # The frequencies are not in a checkpoint: they follow from the configuration.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(decoder.device)
    return model.eval()


def unpair_rows(weight: Tensor, head_dim: int) -> Tensor:
    """Undo `rope.pair_rows`: each head's rows from pairs to (first half, second half)."""
    pairs = weight.view(-1, head_dim // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _checkpoint_norm(norm: Norm, decoder: Decoder) -> Tensor:
    """A norm's weight as in a checkpoint. On the CPU a Norm holds it times sqrt(dim)."""
    weight = norm.weight / math.sqrt(norm.weight.shape[-1]) if norm.weight.device.type == "cpu" else norm.weight
    return weight.to(decoder.dtype)


def _backend(vocab_size: int) -> tokenizers.Tokenizer:
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: i for i, letter in enumerate(letters)} | {"<eos>": EOS}
    words |= {f"Ġw{i}": i for i in range(EOS + 1, vocab_size)}  # Ġ: a space, as byte-level vocabularies write it
    backend = tokenizers.Tokenizer(models.BPE(vocab=words, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    return backend
