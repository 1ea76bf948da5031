"""What the training of heads with layers shares: options, and a shape like that of the target's layers."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.errors import ConfigError
from outrider.core.sampling import check_int
from outrider.models.config import DecoderConfig
from outrider.models.heads.config import HeadConfig, HeadKind
from outrider.train.config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersTrainConfig(TrainConfig):
    """A head with layers over the target's tapped outputs."""

    layers: int = 1
    taps: tuple[int, ...] = ()
    """Layers of the target whose outputs are read; empty: three of them, as is usual for this kind of head."""
    intermediate_size: int = 0
    """Of its MLPs; 0: the target's."""
    draft_vocab: int = 16_384
    """Tokens that can be drafted, the most frequent in the answers; 0: all."""

    def __post_init__(self) -> None:
        TrainConfig.__post_init__(self)
        check_int("layers", self.layers, 1, 64)
        check_int("intermediate_size", self.intermediate_size, 0, 1 << 20)
        check_int("draft_vocab", self.draft_vocab, 0, 1 << 24)

    def shaped_as_target(self, kind: HeadKind, target: DecoderConfig, taps: set[int]) -> HeadConfig:
        """The shape of a head with layers like the target's. taps: the default of its kind, where none are configured.

        ConfigError where taps or draft_vocab do not fit the target.
        """
        count, chosen = len(target.layers), self.taps or tuple(sorted(taps))
        if not all(0 <= tap < count for tap in chosen):
            raise ConfigError(f"taps are layers of the target, 0 to {count - 1}; got {', '.join(map(str, chosen))}")
        if self.draft_vocab > target.vocab_size:
            raise ConfigError(f"draft_vocab is at most {target.vocab_size}, the target's vocabulary")
        return HeadConfig(
            kind=kind,
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            target_layers=count,
            draft_vocab_size=0 if self.draft_vocab == target.vocab_size else self.draft_vocab,
            taps=chosen,
            layers=self.layers,
            heads=target.heads,
            kv_heads=target.kv_heads,
            head_dim=target.head_dim,
            intermediate_size=self.intermediate_size or target.intermediate_size,
            norm_eps=target.norm_eps,
            rope=target.ropes[0],
            max_positions=target.max_positions,
            activation=target.activation,
        )
