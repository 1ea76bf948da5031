"""Trains a block head (DSpark's recipe): blocks at random anchors, all positions of a block at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.core.errors import ConfigError
from outrider.core.sampling import check_int
from outrider.models.config import DecoderConfig
from outrider.models.decoder import Decoder
from outrider.models.heads.block import BlockHead
from outrider.models.heads.config import HeadConfig
from outrider.train.acceptance import AnswerLabels, Tally
from outrider.train.corpus import Corpus
from outrider.train.head_shape import LayersTrainConfig
from outrider.train.packing import PADDING, PackedRows, pack
from outrider.train.target import (
    MAX_ELEMENTS,
    TargetOutputs,
    TrainingTarget,
    additive,
    attention,
    begin_as_target,
    in_chunks,
)
from outrider.train.vocabulary import DraftVocabulary

MEASURED_TEXTS = 8  # for the size of the target's outputs
ANCHOR_MULTIPLE = 8  # anchors of a row: attention wants masks of aligned rows


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTrainConfig(LayersTrainConfig):
    """A block head and its loss."""

    block: int = 7
    """Tokens drafted in one pass."""
    layers: int = 2
    markov_rank: int = 32
    ce: float = 0.1
    """Weight of the cross entropy with the target's distribution."""
    l1: float = 0.9
    """Weight of the distance between the head's and the target's distribution."""
    mask_token: bool = False
    """Rows to be drafted begin with the embedding of the corpus's rarest token, as vLLM reads, not a trained vector."""
    confidence: float = 1.0
    """Weight of the confidence's cross entropy; 0: no confidence head."""
    decay: float = 4.0
    """Position k of a block weighs exp(-k / this)."""

    def __post_init__(self) -> None:
        LayersTrainConfig.__post_init__(self)
        check_int("block", self.block, 1, 64)
        check_int("markov_rank", self.markov_rank, 0, 4096)
        if self.decay <= 0 or min(self.ce, self.l1, self.confidence) < 0 or self.ce + self.l1 <= 0:
            raise ConfigError("ce, l1 and confidence are weights, 0 or more, and not all 0; decay is above 0")

    def head_config(self, target: DecoderConfig) -> HeadConfig:
        """The head: layers shaped as the target's own."""
        count = len(target.layers)
        shaped = self.shaped_as_target("block", target, {min(1, count - 1), count // 2, max(0, count - 3)})
        return replace(
            shaped,
            qk_norm=True,
            block_size=self.block,
            own_mask=not self.mask_token,
            markov_rank=self.markov_rank,
            confidence=self.confidence > 0,
            confidence_with_markov=self.confidence > 0 and self.markov_rank > 0,
            sample_from_anchor=True,
        )


def make_head(config: HeadConfig, decoder: Decoder, tokens: Tensor | None, seed: int) -> BlockHead:
    """A head to be trained, float32, on the decoder's device. tokens: int64, what it can draft; None: everything."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = BlockHead(config, decoder)
        begin_as_target(head.norm, decoder)
        if head.mask_embedding is not None:
            spread = decoder.weights.embedding.float().std().item()
            nn.init.normal_(head.mask_embedding, std=spread)
        if head.markov_head is not None:
            nn.init.normal_(head.markov_head.markov_w1.weight, std=0.1)
            nn.init.zeros_(head.markov_head.markov_w2.weight)
    if tokens is not None:
        head.register_buffer("d2t", tokens - torch.arange(len(tokens)))
    return head.to(decoder.device)


def feature_sizes(target: TrainingTarget, corpus: Corpus, length: int) -> Tensor:
    """Factors that bring each column of the tapped outputs to a mean size of 1: float [taps * hidden].

    Some columns are a thousand times as large as others. In training the outputs are multiplied by the factors; in the
    written head they are part of the weights of `fc`.
    """
    rows = pack(corpus, corpus.split()[1][:MEASURED_TEXTS], length).to(target.decoder.device)
    seen = target.read(rows).features[rows.texts.flatten() != PADDING].float()
    return 1 / seen.abs().mean(0).clamp(min=1e-6)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks over packed rows: A anchors in each of R rows, K draft tokens behind each. On the device."""

    row: Tensor  # int64 [R * A]
    at: Tensor  # int64 [R * A]: the anchor's column
    valid: Tensor  # bool [R * A, K]: the answer goes so far
    before: Tensor  # int64 [R * A, K]: the token before each draft token
    labels: Tensor  # int64 [R * A, K]: the answer's own token there
    sources: Tensor  # int64 [R * A, K]: row of the target's outputs that predicts it

    @classmethod
    def choose(cls, rows: PackedRows, positions: int, per_row: int, draws: Tensor) -> Blocks:
        """Random anchors: in each row, the places of the largest draws among those whose next token is part of an
        answer. Rows with too few get blocks that are not valid. draws: float [R, L], 0 to 1"""
        count, length = rows.tokens.shape
        follows = (rows.texts[:, 1:] == rows.texts[:, :-1]) & rows.in_answer[:, 1:]
        free = F.pad(follows, (0, 1))
        at = draws.masked_fill(~free, -1.0).topk(min(per_row, length), 1).indices.sort(1).values  # [R, A]
        row = torch.arange(count, device=at.device)[:, None].expand_as(at)
        steps = torch.arange(1, positions + 1, device=at.device)
        ahead = at[:, :, None] + steps  # [R, A, K]
        inside = ahead < length
        ahead, across = ahead.clamp(max=length - 1), row[:, :, None]
        same = rows.texts[across, ahead] == rows.texts[row, at][:, :, None]
        valid = inside & same & rows.in_answer[across, ahead] & free[row, at][:, :, None]
        parts = row, at, valid.cumprod(2).bool(), rows.tokens[across, ahead - 1], rows.tokens[across, ahead]
        return cls(*(part.flatten(0, 1) for part in (*parts, across * length + ahead - 1)))


class BlockAttention:
    """A block head's `attend` over packed rows: each block sees its own text before its anchor, and itself."""

    def __init__(self, head: BlockHead, rows: PackedRows, blocks: Blocks, context: list[tuple[Tensor, Tensor]]) -> None:
        """context: keys and values of all tokens of the rows, by layer."""
        config, (count, length) = head.config, rows.tokens.shape
        self._scale, self._count, size = head.scale, count, config.block_size
        self._context = [[part.unflatten(0, (count, length)).transpose(1, 2) for part in pair] for pair in context]
        at = blocks.at.view(count, -1)
        own = rows.texts.gather(1, at)[:, :, None] == rows.texts[:, None, :]  # [R, A, L]
        columns = torch.arange(length, device=at.device)
        seen = own & (columns < at[:, :, None]) & (rows.texts != PADDING)[:, None, :]
        seen = seen.repeat_interleave(size, 1)
        block = torch.arange(seen.shape[1], device=at.device) // size
        mates = block[:, None] == block[None, :]
        mates = mates.tril() if config.causal else mates
        allowed = torch.cat([seen, mates.expand(count, -1, -1)], 2)[:, None]
        self._mask = additive(allowed, context[0][1].dtype)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.unflatten(0, (self._count, -1)).transpose(1, 2) for part in (q, k, v))
        before_k, before_v = self._context[layer]
        k, v = torch.cat([before_k, k], 2), torch.cat([before_v, v], 2)
        return attention(q, k, v, self._mask, self._scale).transpose(1, 2).flatten(2).flatten(0, 1)


class BlockRecipe:
    """Cross entropy with the target's distribution, L1 to it, cross entropy of the confidence."""

    def __init__(self, head: BlockHead, target: TrainingTarget, config: BlockTrainConfig, corpus: Corpus) -> None:
        self.head, self.target, self.config = head, target, config
        self.positions = head.drafts
        device = target.decoder.device
        self._weights = torch.exp(-torch.arange(self.positions, device=device) / config.decay)
        self._vocabulary = DraftVocabulary(head.tokens, target.decoder)
        self._scales = torch.tensor([config.ce, config.l1, config.confidence], device=device)
        self._uncapped = target.decoder.config.final_softcap is None
        self._labels = AnswerLabels(corpus, device)
        self._sizes = feature_sizes(target, corpus, config.length)

    def backward(self, rows: PackedRows, outputs: TargetOutputs, draws: Tensor, share: float) -> dict[str, Tensor]:
        blocks, hidden = self._run(rows, outputs, draws)
        weights = (self._weights * blocks.valid).flatten()
        weights = weights / weights.sum().clamp(min=1e-6)
        whole = hidden.flatten(0, 1)
        # The logits are the largest tensors by far: a chunk's gradient is taken before the next is computed.
        leaf = whole.detach().requires_grad_()
        sums = torch.zeros(4, device=leaf.device)
        for part in in_chunks(len(leaf), MAX_ELEMENTS // self._vocabulary.size):
            terms = self._terms(leaf[part], blocks, outputs, part)
            parts = torch.stack([(term * weights[part]).sum() for term in terms])
            loss = (parts * self._scales).sum()
            (share * loss).backward()
            sums += torch.cat([loss.detach()[None], parts.detach()])
        whole.backward(leaf.grad)
        return dict(zip(("loss", "ce", "l1", "confidence"), sums, strict=True))

    def tensors(self) -> dict[str, Tensor]:
        found = dict(self.head.state_dict())
        return found | {"fc.weight": found["fc.weight"] * self._sizes}

    def judge(self, rows: PackedRows, outputs: TargetOutputs, draws: Tensor, tally: Tally) -> None:
        blocks, hidden = self._run(rows, outputs, draws)
        whole, found = hidden.flatten(0, 1), []
        answers = rows.answers[blocks.row, blocks.at].clamp(min=0)
        sampled = self._labels.sampled[answers]
        drawn = sampled[:, None].expand_as(blocks.valid).flatten().bool()
        for part in in_chunks(len(whole), MAX_ELEMENTS // self._vocabulary.size):
            own, bias = self._logits(whole[part], blocks.before.flatten()[part])
            target = self._vocabulary.target_logits(outputs, blocks.sources.flatten()[part])
            l1 = self._vocabulary.losses(own, bias, target).distance
            logits = own.float() if bias is None else own.float() + bias.float()
            best = self._vocabulary.target_ids(logits.argmax(-1)) == blocks.labels.flatten()[part]
            found.append(torch.where(drawn[part], 1 - l1 / 2, best.float()))
        tally.add(sampled, self._labels.kinds[answers], torch.cat(found).view(blocks.valid.shape), blocks.valid)

    def _run(self, rows: PackedRows, outputs: TargetOutputs, draws: Tensor) -> tuple[Blocks, Tensor]:
        """Blocks at random anchors, and their outputs [R * A, K, hidden]; about as many rows as tokens."""
        head, length = self.head, rows.tokens.shape[1]
        per_row = max(1, length // head.config.block_size)
        per_row -= per_row % ANCHOR_MULTIPLE if per_row > ANCHOR_MULTIPLE else 0
        blocks = Blocks.choose(rows, self.positions, per_row, draws)
        context = head.keys_values(head.context(outputs.features * self._sizes), rows.positions.flatten())
        attend = BlockAttention(head, rows, blocks, context)
        anchors, positions = rows.tokens[blocks.row, blocks.at], rows.positions[blocks.row, blocks.at]
        return blocks, head(anchors, positions, attend)

    def _logits(self, hidden: Tensor, before: Tensor) -> tuple[Tensor, Tensor | None]:
        """[N, hidden], int64 [N] -> [N, outputs] twice: logits, and the Markov head's summand; None: there is none"""
        own = self.head.output_head()(hidden) if self._uncapped else self.head.logits(hidden)
        return own, None if self.head.markov_head is None else self.head.markov_head(before)

    def _terms(self, hidden: Tensor, blocks: Blocks, outputs: TargetOutputs, part: slice) -> tuple[Tensor, ...]:
        """For each draft token [N]: cross entropy, L1, cross entropy of the confidence."""
        before = blocks.before.flatten()[part]
        target = self._vocabulary.target_logits(outputs, blocks.sources.flatten()[part])
        found = self._vocabulary.losses(*self._logits(hidden, before), target)
        ce, l1 = found.entropy, found.distance
        if self.head.confidence_head is None:
            return ce, l1, torch.zeros_like(l1)
        stated = self.head.confidence(hidden, before)
        return ce, l1, F.binary_cross_entropy_with_logits(stated, 1 - l1.detach() / 2, reduction="none")
