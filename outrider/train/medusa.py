"""Trains Medusa heads: each predicts one of the next positions from the target's last hidden state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from outrider.core.errors import ConfigError
from outrider.core.sampling import check_int
from outrider.models.config import DecoderConfig
from outrider.models.decoder import Decoder
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.medusa import MedusaHead
from outrider.train.acceptance import AnswerLabels, Tally
from outrider.train.config import TrainConfig
from outrider.train.corpus import Corpus
from outrider.train.files import write_bytes, write_json
from outrider.train.packing import PackedRows
from outrider.train.target import MAX_ELEMENTS, TargetOutputs, TrainingTarget, in_chunks
from outrider.train.vocabulary import DraftVocabulary, TargetLogits


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaTrainConfig(TrainConfig):
    """Medusa heads and their loss. They draft from the whole vocabulary, by the target's own output head."""

    heads: int = 4
    """Tokens drafted in one pass."""
    layers: int = 1
    """Residual layers of each head."""
    decay: float = 0.8
    """Each head weighs this much of the one before."""

    def __post_init__(self) -> None:
        TrainConfig.__post_init__(self)
        check_int("heads", self.heads, 1, 64)
        check_int("layers", self.layers, 1, 16)
        if not 0 < self.decay <= 1:
            raise ConfigError(f"decay is above 0 and at most 1, got {self.decay!r}")

    def head_config(self, target: DecoderConfig) -> HeadConfig:
        return HeadConfig(
            kind="medusa",
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            taps=(len(target.layers) - 1,),
            layers=0,
            medusa_heads=self.heads,
            medusa_layers=self.layers,
        )


def make_medusa(config: HeadConfig, decoder: Decoder) -> MedusaHead:
    """Heads to be trained, float32, on the decoder's device: at first each predicts what the target predicts for the
    next token."""
    head = MedusaHead(config, decoder)
    for each in head.parameters():
        nn.init.zeros_(each)
    return head.to(decoder.device)


def write_medusa(folder: Path, config: HeadConfig, tensors: Mapping[str, Tensor], target: str) -> None:
    """Write heads in Medusa's own layout, bf16. DiskError where there is no room."""
    stored = {name: each.detach().to("cpu", torch.bfloat16).contiguous() for name, each in tensors.items()}
    write_bytes(folder / "model.safetensors", save(stored, {"format": "pt"}))
    facts = {"medusa_num_heads": config.medusa_heads, "medusa_num_layers": config.medusa_layers}
    names = {"model_type": "medusa", "base_model_name_or_path": target}
    write_json(folder / "config.json", names | facts)


class MedusaRecipe:
    """Soft cross entropy of each head with the target's distribution at its position."""

    def __init__(self, head: MedusaHead, target: TrainingTarget, config: MedusaTrainConfig, corpus: Corpus) -> None:
        self.head, self.target, self.config, self.positions = head, target, config, config.heads
        device = target.decoder.device
        self._vocabulary = DraftVocabulary(None, target.decoder)
        self._labels = AnswerLabels(corpus, device)

    def backward(self, rows: PackedRows, outputs: TargetOutputs, draws: Tensor, share: float) -> dict[str, Tensor]:
        """Head i at token t predicts token t + i + 2, whose distribution is the target's output at t + i + 1."""
        valid = self._valid(rows)
        weights = self.config.decay ** torch.arange(self.positions, device=valid.device) * valid
        weights = weights / valid[:, 0].sum().clamp(min=1)
        loss = weights.new_zeros(())
        for part in in_chunks(len(valid), MAX_ELEMENTS // self.head.config.vocab_size):
            for i in range(self.positions):
                logits = self.head.head_logits(i, outputs.hidden[part])
                terms = self._vocabulary.losses(logits, None, self._target_logits(outputs, part, i)).entropy
                one = (terms * weights[part, i]).sum()
                (share * one).backward()
                loss += one.detach()
        return {"loss": loss}

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.head.state_dict())

    def judge(self, rows: PackedRows, outputs: TargetOutputs, draws: Tensor, tally: Tally) -> None:
        valid, answers = self._valid(rows), rows.answers.flatten().clamp(min=0)
        sampled, accepted = self._labels.sampled[answers], torch.zeros(valid.shape, device=valid.device)
        for part in in_chunks(len(valid), MAX_ELEMENTS // self.head.config.vocab_size):
            for i in range(self.positions):
                logits = self.head.head_logits(i, outputs.hidden[part])
                overlap = 1 - self._vocabulary.losses(logits, None, self._target_logits(outputs, part, i)).distance / 2
                best = logits.argmax(-1) == rows.tokens.flatten().roll(-i - 2)[part]
                accepted[part, i] = torch.where(sampled[part].bool(), overlap, best.float())
        chains = valid.cumprod(1).bool()  # those that begin in an answer, as far as it goes
        tally.add(sampled, self._labels.kinds[answers], accepted, chains)

    def _target_logits(self, outputs: TargetOutputs, part: slice, i: int) -> TargetLogits:
        """The target's logits at the position that head i predicts, for the rows of a chunk."""
        at = torch.arange(part.start, part.stop, device=outputs.hidden.device) + i + 1
        return self._vocabulary.target_logits(outputs, at.clamp(max=len(outputs.hidden) - 1))

    def _valid(self, rows: PackedRows) -> Tensor:
        """bool [R * L, heads]: whether the token that each head predicts is part of the same answer."""
        length, found = rows.tokens.shape[1], list[Tensor]()
        for ahead in range(2, self.positions + 2):
            count = max(0, length - ahead)
            same = torch.zeros_like(rows.in_answer)
            same[:, :count] = (rows.texts[:, :count] == rows.texts[:, ahead:]) & rows.in_answer[:, ahead:]
            found.append(same.flatten())
        return torch.stack(found, 1)
