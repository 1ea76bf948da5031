"""Distils a small ordinary model from the target: a draft model, from scratch or from a checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.checkpoints.resolve import resolve
from outrider.checkpoints.tensors import open_tensors
from outrider.core.errors import ConfigError
from outrider.core.sampling import check_int
from outrider.models.config import DecoderConfig
from outrider.models.decoder import Attend, Decoder
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.layers import HeadLayer, RMSNorm, Rotary
from outrider.models.heads.save import layer_json, write_folder
from outrider.models.linear import Linear
from outrider.models.load import read_config
from outrider.train.acceptance import AnswerLabels, Tally
from outrider.train.config import TrainConfig
from outrider.train.corpus import Corpus
from outrider.train.packing import PackedRows
from outrider.train.target import (
    MAX_ELEMENTS,
    TargetOutputs,
    TrainingTarget,
    additive,
    attention,
    begin_as_target,
    in_chunks,
    text_mask,
)
from outrider.train.vocabulary import DraftVocabulary

TOKENIZER_FILES = ("*token*.json", "*token*.model", "vocab.json", "merges.txt", "*.jinja", "generation_config.json")
"""Files copied from the target's folder, so that the draft model's folder is complete."""
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TOP = {"embed_tokens.weight": "model.embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
"""Names of these tensors in a checkpoint; the names of all others begin with `model.` there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTrainConfig(TrainConfig):
    """A draft model of the Llama architecture. The loss is the cross entropy with the target's distribution."""

    start: str = ""
    """A checkpoint to begin with, of the same vocabulary; empty: random layers."""
    layers: int = 4
    """Only without `start`, like the sizes below."""
    hidden_size: int = 0
    """0: the target's."""
    intermediate_size: int = 0
    """0: in proportion to the target's."""
    own_embedding: bool = False
    """Train an embedding that is also the output head, in place of the target's own two, which are not trained."""
    chain: int = 5
    """Tokens of the chains whose acceptance is reported."""

    def __post_init__(self) -> None:
        TrainConfig.__post_init__(self)
        check_int("layers", self.layers, 1, 256)
        check_int("hidden_size", self.hidden_size, 0, 1 << 16)
        check_int("intermediate_size", self.intermediate_size, 0, 1 << 20)
        check_int("chain", self.chain, 1, 64)

    def head_config(self, target: DecoderConfig) -> HeadConfig:
        """The shape of the model. ConfigError where there cannot be such a model for this target."""
        return _started(self.start, target) if self.start else self._new(target)

    def _new(self, target: DecoderConfig) -> HeadConfig:
        hidden, dim = self.hidden_size or target.hidden_size, target.head_dim
        same = hidden == target.hidden_size
        if not same and hidden % dim:
            raise ConfigError(f"hidden_size is a multiple of {dim}, the size of an attention head; got {hidden}")
        own = self.own_embedding or not same
        if not own and target.embedding_scale != 1:
            raise ConfigError("this target scales its embedding, which Llama's architecture does not: --own-embedding")
        wide = self.intermediate_size or max(1, target.intermediate_size * hidden // target.hidden_size)
        return HeadConfig(
            kind="draft",
            vocab_size=target.vocab_size,
            hidden_size=hidden,
            target_hidden_size=target.hidden_size,
            own_embedding=own,
            layers=self.layers,
            heads=target.heads if same else hidden // dim,
            kv_heads=target.kv_heads if same else hidden // dim,
            head_dim=dim,
            intermediate_size=wide,
            norm_eps=target.norm_eps,
            rope=target.ropes[0],
            max_positions=target.max_positions,
        )


def _started(name: str, target: DecoderConfig) -> HeadConfig:
    """The shape of a checkpoint to begin with."""
    config = read_config(resolve(name))
    if config is None or not _is_plain(config):
        raise ConfigError(f"{name} cannot be trained further here; begin with a Llama, Mistral, Qwen2 or Qwen3 model")
    if config.vocab_size != target.vocab_size:
        raise ConfigError(
            f"{name} has {config.vocab_size} tokens and the target {target.vocab_size}; begin with a model of the "
            "target's tokenizer, or from scratch"
        )
    return HeadConfig(
        kind="draft",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        target_hidden_size=target.hidden_size,
        own_embedding=True,
        own_head=not config.tied,
        layers=len(config.layers),
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        norm_eps=config.norm_eps,
        rope=config.ropes[0],
        max_positions=config.max_positions,
        activation=config.activation,
        qk_norm=config.qk_norm,
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
    )


def _is_plain(config: DecoderConfig) -> bool:
    """Whether `DraftModel` implements this architecture."""
    capped = config.attention_softcap is not None or config.final_softcap is not None
    extra = config.sandwich_norms or config.mlp_bias or config.unit_offset or config.embedding_scale != 1
    varied = len(config.ropes) > 1 or any(layer.window for layer in config.layers)
    return not (capped or extra or varied) and config.attention_scale == config.head_dim**-0.5


class DraftModel(nn.Module):
    """A model to be trained. Its parameters are named as in checkpoints, but for the `model.` before most of them."""

    def __init__(self, config: HeadConfig, decoder: Decoder) -> None:
        super().__init__()
        self.config, self.decoder = config, decoder
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embedding else None
        self.layers = nn.ModuleList(HeadLayer(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if config.own_head else None
        self.rotary = Rotary(config)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """int64 [N] both -> [N, hidden], after the final norm"""
        table = self.decoder.weights.embedding if self.embed_tokens is None else self.embed_tokens.weight
        x, rotation = F.embedding(ids, table).to(self.norm.weight.dtype), self.rotary(positions)
        for layer in self.layers:
            x = layer(x, rotation, attend)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, vocab]"""
        if self.lm_head is not None:
            return self.lm_head(hidden).float()
        if self.embed_tokens is not None:
            return F.linear(hidden, self.embed_tokens.weight).float()
        return self.decoder.logits(hidden)


def make_draft(config: HeadConfig, decoder: Decoder, train: DraftTrainConfig) -> DraftModel:
    """A model to be trained, float32, on the decoder's device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(train.seed)
        model = DraftModel(config, decoder)
        if model.embed_tokens is not None:
            nn.init.normal_(model.embed_tokens.weight, std=config.hidden_size**-0.5)
    if model.embed_tokens is None:
        begin_as_target(model.norm, decoder)
    if train.start:
        with open_tensors(resolve(train.start)) as tensors, torch.no_grad():
            for name, own in model.state_dict().items():
                own.copy_(tensors.read(_TOP.get(name, f"model.{name}"), torch.device("cpu"), torch.float32))
    return model.to(decoder.device)


def write_draft(folder: Path, head: DraftModel, start: str, target: Path, max_file_bytes: int) -> None:
    """An ordinary Hugging Face folder, bf16, with the target's tokenizer; never half-written.

    start: the checkpoint it began with, whose config.json stays its own. target: the target's folder.
    """
    tensors = {_TOP.get(name, f"model.{name}"): each for name, each in head.state_dict().items()}
    tied = not head.config.own_head
    if not head.config.own_embedding:
        weights = head.decoder.weights
        tensors["model.embed_tokens.weight"] = weights.embedding
        output = cast(Linear, weights.head).weight
        tied = output is weights.embedding
        if not tied:
            tensors["lm_head.weight"] = output
    stored = {name: each.detach().to("cpu", torch.bfloat16).contiguous() for name, each in tensors.items()}
    if start:
        config = _read_json(resolve(start))
    else:
        ids = {key: value for key, value in _read_json(target).items() if key in _TOKEN_IDS}
        config = {"architectures": ["LlamaForCausalLM"], **layer_json(head.config), **ids, "tie_word_embeddings": tied}
    copied = {file.name: file for pattern in TOKENIZER_FILES for file in target.glob(pattern)}
    files = {name: file.read_bytes() for name, file in copied.items()}
    write_folder(folder, config | {"torch_dtype": "bfloat16"}, stored, max_file_bytes, files)


def _read_json(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


class DraftRecipe:
    """Cross entropy with the target's distribution at every token of the answers."""

    def __init__(self, head: DraftModel, target: TrainingTarget, config: DraftTrainConfig, corpus: Corpus) -> None:
        self.head, self.target, self.positions = head, target, config.chain
        self._vocabulary = DraftVocabulary(None, target.decoder)
        self._labels = AnswerLabels(corpus, target.decoder.device)

    def backward(self, rows: PackedRows, outputs: TargetOutputs, draws: Tensor, share: float) -> dict[str, Tensor]:
        made = self._run(rows)
        leaf = made.detach().requires_grad_()
        weights = _follows(rows).float()
        weights = weights / weights.sum().clamp(min=1)
        loss = weights.new_zeros(())
        for part in in_chunks(len(leaf), MAX_ELEMENTS // self._vocabulary.size):
            found = self._vocabulary.losses(
                self.head.logits(leaf[part]), None, self._vocabulary.target_logits(outputs, part)
            )
            one = (found.entropy * weights[part]).sum()
            (share * one).backward()
            loss += one.detach()
        made.backward(leaf.grad)
        return {"loss": loss}

    def judge(self, rows: PackedRows, outputs: TargetOutputs, draws: Tensor, tally: Tally) -> None:
        """A chain reads the answer's own tokens as long as it is right, so one pass judges all chains."""
        made, follows = self._run(rows), _follows(rows)
        answers, labels = rows.answers.flatten().clamp(min=0), rows.tokens.flatten().roll(-1)
        sampled, found = self._labels.sampled[answers], list[Tensor]()
        for part in in_chunks(len(made), MAX_ELEMENTS // self._vocabulary.size):
            logits = self.head.logits(made[part])
            overlap = (
                1 - self._vocabulary.losses(logits, None, self._vocabulary.target_logits(outputs, part)).distance / 2
            )
            found.append(torch.where(sampled[part].bool(), overlap, (logits.argmax(-1) == labels[part]).float()))
        ahead = torch.arange(len(labels), device=labels.device)[:, None] + torch.arange(
            self.positions, device=labels.device
        )
        inside, ahead = ahead < len(labels), ahead.clamp(max=len(labels) - 1)
        valid = (follows[ahead] & inside).cumprod(1).bool()
        tally.add(sampled, self._labels.kinds[answers], torch.cat(found)[ahead], valid)

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.head.state_dict())

    def _run(self, rows: PackedRows) -> Tensor:
        """[R * L, hidden]"""
        attend = DraftAttention(self.head.config, rows, self.target.decoder.dtype)
        return self.head(rows.tokens.flatten(), rows.positions.flatten(), attend)


class DraftAttention:
    """A draft model's `attend` over packed rows: causal within each text."""

    def __init__(self, config: HeadConfig, rows: PackedRows, dtype: torch.dtype) -> None:
        self._shape, self._scale = rows.tokens.shape, config.head_dim**-0.5
        self._mask = additive(text_mask(rows.texts), dtype)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.unflatten(0, self._shape).transpose(1, 2) for part in (q, k, v))
        return attention(q, k, v, self._mask, self._scale).transpose(1, 2).flatten(2).flatten(0, 1)


def _follows(rows: PackedRows) -> Tensor:
    """For each token, whether the next one is part of the same answer: bool [R * L]"""
    same = (rows.texts[:, 1:] == rows.texts[:, :-1]) & rows.in_answer[:, 1:]
    return F.pad(same, (0, 1)).flatten()
