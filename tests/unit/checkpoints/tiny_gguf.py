"""Tiny GGUF files, written the way llama.cpp's converter writes them, from tiny Transformers models."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

TEXT = [
    "def the_cat(sat): return 1234 + 5",
    "the cat sat on the mat, the hat and the café",
    "Ünïcödé 東京 and more text",
]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"

ARCH_OF = {"gemma3_text": "gemma3", "mistral": "llama"}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


@cache
def byte_level_vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE trained on a few lines, specials first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False),
    )
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    vocab = tokenizer.get_vocab()
    return sorted(vocab, key=vocab.__getitem__), [" ".join(merge) for merge in merges]


def random_model(model_type: str, **options: Any) -> Any:
    """A float32 Transformers model of this type with random weights, norms and biases too."""
    tokens, _ = byte_level_vocabulary()
    config = AutoConfig.for_model(
        model_type, **{**SIZES, "vocab_size": len(tokens) + 3, "tie_word_embeddings": True, **options}
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    return model.eval()


def stored_as_llama_cpp_does(name: str, weight: np.ndarray, model_type: str, config: Any) -> np.ndarray:
    if model_type.startswith("gemma") and name.endswith("norm.weight"):
        return weight + 1
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if model_type in ("llama", "mistral") and heads:
        return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    return weight


def write_gguf(file: Path, model: Any, *, kind: gguf.GGMLQuantizationType | None = None, extra: Any = None) -> None:
    """Write the model and the byte-level vocabulary. `kind` quantises the matrices; `extra` may add to the writer."""
    config, model_type = model.config, model.config.model_type
    arch = ARCH_OF.get(model_type, model_type)
    writer = gguf.GGUFWriter(str(file), arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    add_vocabulary(writer)
    if extra:
        extra(writer)
    # gguf's own table from Hugging Face's names to llama.cpp's: the judge of ours
    table = gguf.get_tensor_name_map(
        next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch), config.num_hidden_layers
    )
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = stored_as_llama_cpp_does(name, parameter.numpy(), model_type, config)
        add_tensor(writer, table.get_name(name, try_suffixes=(".weight", ".bias")), stored, kind)
    finish(writer)


def add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: gguf.GGMLQuantizationType | None) -> None:
    if kind is not None and values.ndim == 2:
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    tokens, merges = byte_level_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIALS else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_llama(file: Path) -> Any:
    """Write a tiny llama and give back the model it came from."""
    model = random_model("llama")
    write_gguf(file, model)
    return model
