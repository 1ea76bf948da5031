"""Load a model's folder into a native decoder: each tensor is checked, read, fused, and cast or quantized."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import reduce
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from outrider.checkpoints.folder import check_folder, source_bits
from outrider.checkpoints.storage import NoProgress, Progress
from outrider.checkpoints.tensors import FLOAT_DTYPES, Tensors, open_tensors
from outrider.core.errors import ConfigError
from outrider.models.blocks import BlockLinear, BlockPacker
from outrider.models.config import DecoderConfig
from outrider.models.decoder import Decoder, Layer, Norm, Weights
from outrider.models.families import parse_config
from outrider.models.fields import FieldError, UnsupportedModel
from outrider.models.heads.mtp_layout import mtp_tensors
from outrider.models.linear import PACKED_ROWS, QUANTIZED_BITS, Int4Linear, Int8Linear, Linear, LinearOp, Quantization
from outrider.models.rope import pair_rows
from outrider.native.library import library
from outrider.native.tensors import BlockTensor

EMBEDDING_NAME, FINAL_NORM_NAME, HEAD_NAME = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def load_decoder(
    folder: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    quantize: Quantization | None = None,
    progress: Progress | None = None,
) -> Decoder:
    """Load the checkpoint in `folder`: config.json, and safetensors or the GGUF file it refers to.

    dtype None is `default_dtype`. quantize packs the
    weights to 4 or 8 bits, on the CPU only; the residual stream is then float32. Raises
    ConfigError where the native decoder does not support the model, or the tensors do not
    fit its config.json.
    """
    device = torch.device(device)
    if quantize is not None and (device.type != "cpu" or dtype not in (None, torch.float32)):
        raise ConfigError(
            f"quantize={quantize!r} packs weights for the CPU and a float32 stream, not for {device} and {dtype}; "
            "leave out quantize, or use device='cpu' and no dtype"
        )
    if dtype not in (None, *FLOAT_DTYPES):
        raise ConfigError(f"dtype {dtype} is not supported; use one of {', '.join(map(str, FLOAT_DTYPES))}")
    try:
        config = _parse_folder(check_folder(folder))
    except UnsupportedModel as reason:
        raise ConfigError(
            f"the native decoder cannot run {folder}: {reason}; the Transformers fallback may, "
            "or an unquantised checkpoint of a supported family"
        ) from reason
    dtype = dtype or default_dtype(config, device)
    with open_tensors(folder) as tensors:
        check_tensors(config, tensors, folder)
        packer = None
        if quantize is not None and (found := library()) is not None:
            keeps_blocks = 0 < source_bits(folder) <= QUANTIZED_BITS[quantize]
            packer = BlockPacker(found, tensors, quantize, keeps_blocks, config.head_dim)
        builder = _Builder(config, tensors, device, dtype, quantize, packer)
        return Decoder(config, builder.weights(progress or NoProgress()), dtype)


def default_dtype(config: DecoderConfig, device: torch.device) -> torch.dtype:
    """The dtype that a model runs in by default: float32 on the CPU; elsewhere the checkpoint's own 16 bits, or
    bfloat16 where it is stored in float32 or in the blocks of a GGUF file."""
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if config.dtype is torch.float32 else config.dtype


def weight_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes of a model's weights in this dtype."""
    return dtype.itemsize * sum(prod(shape) for shape in _expected_shapes(config).values())


def read_config(folder: Path) -> DecoderConfig | None:
    """The decoder that a folder's config.json describes; None where only the Transformers fallback can run it.

    Raises ConfigError where the file is broken.
    """
    try:
        return _parse_folder(folder)
    except UnsupportedModel:
        return None


def _parse_folder(folder: Path) -> DecoderConfig:
    """As `read_config`, but raises UnsupportedModel with the reason."""
    file = folder / "config.json"
    try:
        config_json = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON ({error}); download or save the model again") from error
    if not isinstance(config_json, dict):
        raise ConfigError(f"{file} is not a JSON object; download or save the model again")
    try:
        return parse_config(config_json)
    except FieldError as fault:
        raise ConfigError(f"{file}: {fault}; mend it, or download or save the model again") from fault


def layer_matrices(config: DecoderConfig) -> list[tuple[str, int, int, bool]]:
    """(name, outputs, inputs, whether there is a bias) of a layer's linear layers."""
    hidden, wide, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.heads * dim, config.kv_heads * dim
    return [
        ("self_attn.q_proj", q, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q, config.out_bias),
        ("mlp.gate_proj", wide, hidden, config.mlp_bias),
        ("mlp.up_proj", wide, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, wide, config.mlp_bias),
    ]


def _expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor the checkpoint must hold. The head is left out where it may be tied."""
    hidden, dim = config.hidden_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING_NAME: (config.vocab_size, hidden), FINAL_NORM_NAME: (hidden,)}
    if not config.tied:
        shapes[HEAD_NAME] = (config.vocab_size, hidden)
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.sandwich_norms:
        norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
    for i in range(len(config.layers)):
        for name, rows, columns, bias in layer_matrices(config):
            shapes[f"model.layers.{i}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"model.layers.{i}.{name}.bias"] = (rows,)
        shapes |= {f"model.layers.{i}.{name}.weight": (width,) for name, width in norms.items()}
    return shapes


def check_tensors(config: DecoderConfig, tensors: Tensors, folder: Path) -> None:
    """Raise ConfigError where a tensor is missing, of the wrong shape, or would not be used."""
    expected, found = _expected_shapes(config), tensors.names()
    if HEAD_NAME in found:
        expected[HEAD_NAME] = expected[EMBEDDING_NAME]
    # Rotary frequencies follow from config.json; older checkpoints store them anyway. MTP modules belong to a drafter.
    surplus = {
        name for name in found - expected.keys() - mtp_tensors(found) if not name.endswith("rotary_emb.inv_freq")
    }
    faults = [f"{name} is missing" for name in sorted(expected.keys() - found)]
    faults += [f"{name} has no place in the model" for name in sorted(surplus)]
    for name in sorted(expected.keys() & found):
        if tensors.shape(name) != expected[name]:
            faults.append(f"{name} has shape {tensors.shape(name)}, not {expected[name]}")
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise ConfigError(f"the weights in {folder} do not fit its config.json: {'; '.join(faults[:5])}{more}")


@dataclass(frozen=True, slots=True)
class _Builder:
    """Builds a decoder's weights from a checkpoint's tensors."""

    config: DecoderConfig
    tensors: Tensors
    device: torch.device
    dtype: torch.dtype
    quantize: Quantization | None
    packer: BlockPacker | None
    """Packs for the CPU kernels; None where they are not used."""

    def _layer(self, i: int) -> Layer:
        config, prefix = self.config, f"model.layers.{i}."
        sandwich = config.sandwich_norms
        mlp_norm = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
        attention = f"{prefix}self_attn."
        return Layer(
            attention_norm=self._norm(f"{prefix}input_layernorm"),
            qkv=self._qkv(attention),
            out=self._fused([f"{attention}o_proj"], bias=config.out_bias),
            mlp_norm=self._norm(prefix + mlp_norm),
            gate_up=self._fused([f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"], bias=config.mlp_bias),
            down=self._fused([f"{prefix}mlp.down_proj"], bias=config.mlp_bias),
            qk_norm=self._qk_norm(attention) if config.qk_norm else None,
            post_attention_norm=self._norm(f"{prefix}post_attention_layernorm") if sandwich else None,
            post_mlp_norm=self._norm(f"{prefix}post_feedforward_layernorm") if sandwich else None,
        )

    def weights(self, progress: Progress) -> Weights:
        progress.start("reading weights", len(self.config.layers))
        layers: list[Layer] = []
        for i in range(len(self.config.layers)):
            layers.append(self._layer(i))
            progress.advance(1)
        progress.done()
        norm = self._norm("model.norm")
        if self.packer is not None:
            table = self.packer.table(EMBEDDING_NAME)
            tied = HEAD_NAME not in self.tensors.names()
            if tied and isinstance(table, BlockTensor):
                return Weights(table, layers, norm, BlockLinear((table,)), packed=True)
            head = self.packer.linear([EMBEDDING_NAME if tied else HEAD_NAME], None, as_quantized="int8")
            return Weights(table, layers, norm, head, packed=True)
        # Where weights are packed the embedding is only looked up, so it keeps the checkpoint's own precision.
        table = self._stacked([EMBEDDING_NAME])
        head = self._stacked([HEAD_NAME]) if HEAD_NAME in self.tensors.names() else table
        if self.quantize is not None:
            return Weights(table, layers, norm, Int8Linear(head), packed=True, row_block=PACKED_ROWS)
        return Weights(table, layers, norm, Linear(table if head is table or torch.equal(head, table) else head))

    def _qkv(self, prefix: str) -> LinearOp:
        return self._fused([f"{prefix}{name}_proj" for name in "qkv"], bias=self.config.qkv_bias)

    def _fused(self, names: list[str], *, bias: bool) -> LinearOp:
        """One linear layer of all the named ones, their outputs concatenated; those of q and k in pairs for RoPE."""
        biases = self._stacked([f"{name}.bias" for name in names]) if bias else None
        if self.packer is not None:
            return self.packer.linear([f"{name}.weight" for name in names], biases)
        weight = self._stacked([f"{name}.weight" for name in names])
        if self.quantize is not None:
            return (Int4Linear if self.quantize == "int4" else Int8Linear)(weight, biases)
        return Linear(weight, biases)

    def _stacked(self, names: list[str]) -> Tensor:
        """The named tensors, one below the other, on the device: in the dtype, or as stored where they are packed next.

        Read one at a time, so that no second copy of all of them is ever held.
        """
        dtype = self.dtype
        if self.quantize is not None:
            dtype = reduce(torch.promote_types, (self.tensors.dtype(name) for name in names))
        if len(names) == 1:
            return self._paired(names[0], dtype)
        shapes = [self.tensors.shape(name) for name in names]
        rows = [shape[0] for shape in shapes]
        out = torch.empty(sum(rows), *shapes[0][1:], dtype=dtype, device=self.device)
        for part, name in zip(out.split(rows), names, strict=True):
            part.copy_(self._paired(name, dtype))
        return out

    def _paired(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self.tensors.read(name, self.device, dtype)
        return pair_rows(tensor, self.config.head_dim) if "q_proj" in name or "k_proj" in name else tensor

    def _norm(self, name: str) -> Norm:
        return Norm(self._norm_weight(name), self.config.norm_eps, self.dtype)

    def _qk_norm(self, prefix: str) -> Norm:
        config = self.config
        q, k = (pair_rows(self._norm_weight(f"{prefix}{name}_norm"), config.head_dim) for name in "qk")
        weight = torch.cat((q.expand(config.heads, -1), k.expand(config.kv_heads, -1)))
        return Norm(weight, config.norm_eps)  # float32: RoPE is applied next

    def _norm_weight(self, name: str) -> Tensor:
        weight = self.tensors.read(f"{name}.weight", self.device, torch.float32)
        return 1.0 + weight if self.config.unit_offset else weight
