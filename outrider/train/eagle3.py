"""Trains an EAGLE-3 head: several steps over its own outputs, as it drafts ("training-time test")."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.core.errors import ConfigError
from outrider.core.sampling import check_int
from outrider.models.config import DecoderConfig
from outrider.models.decoder import Decoder
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.eagle import Eagle3Head
from outrider.train.acceptance import AnswerLabels, Tally
from outrider.train.corpus import Corpus
from outrider.train.head_shape import LayersTrainConfig
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3TrainConfig(LayersTrainConfig):
    """An EAGLE-3 head and its loss. By default 3.1: tapped outputs and its own output are normalized."""

    steps: int = 5
    """Steps over its own outputs, and so the tokens of a chain that it is trained for."""
    decay: float = 0.8
    """Each step weighs this much of the one before."""
    fc_norm: bool = True
    norm_output: bool = True

    def __post_init__(self) -> None:
        LayersTrainConfig.__post_init__(self)
        check_int("steps", self.steps, 1, 64)
        if not 0 < self.decay <= 1:
            raise ConfigError(f"decay is above 0 and at most 1, got {self.decay!r}")

    def head_config(self, target: DecoderConfig) -> HeadConfig:
        """The head: a layer shaped as the target's own."""
        count = len(target.layers)
        taps = {min(1, count - 1), max(0, count // 2 - 1), max(0, count - 4)}
        shaped = self.shaped_as_target("eagle3", target, taps)
        return replace(shaped, norm_before_residual=True, fc_norm=self.fc_norm, norm_output=self.norm_output)


def make_eagle3(config: HeadConfig, decoder: Decoder, tokens: Tensor | None, seed: int) -> Eagle3Head:
    """A head to be trained, float32, on the decoder's device. tokens: int64, what it can draft; None: everything."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Eagle3Head(config, decoder)
    begin_as_target(head.norm, decoder)
    if tokens is not None:
        head.register_buffer("d2t", tokens - torch.arange(len(tokens)))
    return head.to(decoder.device)


class StepAttention:
    """An EAGLE head's `attend` over packed rows, step after step.

    A row sees the first step's rows up to its own, in its text, and its own rows of the steps since. The first token
    of a text has no hidden state before it: no other row sees it.
    """

    def __init__(self, rows: PackedRows, steps: int, scale: float, dtype: torch.dtype) -> None:
        self._shape, self._scale = rows.tokens.shape, scale
        own = torch.eye(rows.tokens.shape[1], dtype=torch.bool, device=rows.tokens.device)[None, None]
        first = text_mask(rows.texts) & ((rows.positions > 0)[:, None, None, :] | own)
        later = own.expand(len(rows), -1, -1, -1)
        self._mask = additive(torch.cat([first, *[later] * (steps - 1)], 3), dtype)
        self._keys: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.unflatten(0, self._shape).transpose(1, 2) for part in (q, k, v))
        if layer in self._keys:
            before_k, before_v = self._keys[layer]
            k, v = torch.cat([before_k, k], 2), torch.cat([before_v, v], 2)
        self._keys[layer] = k, v
        mask = self._mask[..., : k.shape[2]]
        return attention(q, k, v, mask, self._scale).transpose(1, 2).flatten(2).flatten(0, 1)


class Eagle3Recipe:
    """Soft cross entropy with the target's distribution over the draft vocabulary, averaged over each answer first."""

    def __init__(self, head: Eagle3Head, target: TrainingTarget, config: Eagle3TrainConfig, corpus: Corpus) -> None:
        self.head, self.target, self.config, self.positions = head, target, config, config.steps
        device = target.decoder.device
        self._vocabulary = DraftVocabulary(head.tokens(), target.decoder)
        self._labels = AnswerLabels(corpus, device)

    def backward(self, rows: PackedRows, outputs: TargetOutputs, draws: Tensor, share: float) -> dict[str, Tensor]:
        """At position s of a row, step j continues the chain that began at s - j."""
        made = self._run(rows, outputs)
        leaves = [each.detach().requires_grad_() for each in made]
        weights = self._weights(rows)  # [steps, R * L]
        loss = weights.new_zeros(())
        for part in in_chunks(weights.shape[1], MAX_ELEMENTS // self._vocabulary.size):
            target, known = self._vocabulary.target_logits(outputs, part), self._vocabulary.known(outputs.best[part])
            at = torch.arange(part.start, part.stop, device=known.device)
            for j, leaf in enumerate(leaves):
                found = self._vocabulary.losses(self._logits(leaf[(at - j).clamp(min=0)]), None, target)
                terms = found.entropy / found.mass.clamp(min=1e-9)  # target probs normalized over the draft vocabulary
                one = (terms * known * weights[j, part]).sum()
                (share * one).backward()
                loss += one.detach()
        torch.autograd.backward(made, [leaf.grad for leaf in leaves])
        return {"loss": loss}

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.head.state_dict())

    def judge(self, rows: PackedRows, outputs: TargetOutputs, draws: Tensor, tally: Tally) -> None:
        made, answers = self._run(rows, outputs), rows.answers.flatten().clamp(min=0)
        follows = self._follows(rows)
        labels, sampled = rows.tokens.flatten().roll(-1), self._labels.sampled[answers]
        accepted = torch.zeros(len(labels), self.positions, device=labels.device)
        valid = torch.zeros_like(accepted, dtype=torch.bool)
        for part in in_chunks(len(labels), MAX_ELEMENTS // self._vocabulary.size):
            target = self._vocabulary.target_logits(outputs, part)
            at = torch.arange(part.start, part.stop, device=labels.device)
            for j, hidden in enumerate(made):
                begins = at - j
                fits = follows[part] & (rows.positions.flatten()[part] > j)
                logits = self._logits(hidden[begins.clamp(min=0)])
                overlap = 1 - self._vocabulary.losses(logits, None, target).distance / 2
                best = self._vocabulary.target_ids(logits.argmax(-1)) == labels[part]
                found = torch.where(sampled[part].bool(), overlap, best.float())
                accepted[begins[fits], j], valid[begins[fits], j] = found[fits], True
        valid &= follows[:, None]  # chains that begin in an answer, or with its first token
        tally.add(sampled, self._labels.kinds[answers], accepted, valid.cumprod(1).bool())

    def _logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, outputs], in the target's dtype where they are not capped"""
        if self.target.decoder.config.final_softcap is not None:
            return self.head.logits(hidden)
        return self.head.output_head()(hidden if self.head.config.norm_output else self.head.norm(hidden))

    def _run(self, rows: PackedRows, outputs: TargetOutputs) -> list[Tensor]:
        """The outputs of all steps, [R * L, hidden] each: row t of step j has read token t + j."""
        head, (count, length) = self.head, rows.tokens.shape
        hidden = head.fuse(outputs.features).view(count, length, -1).roll(1, 1).flatten(0, 1)
        attend = StepAttention(rows, self.positions, head.config.head_dim**-0.5, self.target.decoder.dtype)
        made: list[Tensor] = []
        for j in range(self.positions):
            ids = rows.tokens.roll(-j, 1).flatten()
            hidden = head.step(ids, hidden, (rows.positions + j).flatten(), attend)
            made.append(hidden)
        return made

    def _follows(self, rows: PackedRows) -> Tensor:
        """For each token, whether the next one is part of the same answer: bool [R * L]"""
        same = (rows.texts[:, 1:] == rows.texts[:, :-1]) & rows.in_answer[:, 1:]
        return torch.nn.functional.pad(same, (0, 1)).flatten()

    def _weights(self, rows: PackedRows) -> Tensor:
        """[steps, R * L]: the weight of each position in each step; every answer counts the same in a step."""
        count, length = rows.tokens.shape
        text = (torch.arange(count, device=rows.texts.device)[:, None] * length + rows.texts.clamp(min=0)).flatten()
        weights: list[Tensor] = []
        for j in range(self.positions):
            fits = (self._follows(rows) & (rows.positions.flatten() > j)).float()
            each = torch.zeros(count * length, device=fits.device).index_add_(0, text, fits)
            texts = (each > 0).sum().clamp(min=1)
            weights.append(self.config.decay**j * fits / each.clamp(min=1)[text] / texts)
        return torch.stack(weights)
