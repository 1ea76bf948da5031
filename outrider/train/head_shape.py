"""The shape of a head to be trained: layers like the target's own."""

from __future__ import annotations

from outrider.core.errors import ConfigError
from outrider.models.config import DecoderConfig
from outrider.models.heads.config import HeadConfig, HeadKind


def shaped_as_target(
    kind: HeadKind,
    target: DecoderConfig,
    taps: tuple[int, ...],
    *,
    layers: int,
    intermediate_size: int,
    draft_vocab: int,
) -> HeadConfig:
    """What heads of every kind have. taps: layers of the target. intermediate_size, draft_vocab: 0 for the target's.

    ConfigError where taps or draft_vocab do not fit the target.
    """
    count = len(target.layers)
    if not all(0 <= tap < count for tap in taps):
        raise ConfigError(f"taps are layers of the target, 0 to {count - 1}; got {', '.join(map(str, taps))}")
    if draft_vocab > target.vocab_size:
        raise ConfigError(f"draft_vocab is at most {target.vocab_size}, the target's vocabulary")
    return HeadConfig(
        kind=kind,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        target_layers=count,
        draft_vocab_size=0 if draft_vocab == target.vocab_size else draft_vocab,
        taps=taps,
        layers=layers,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        intermediate_size=intermediate_size or target.intermediate_size,
        norm_eps=target.norm_eps,
        rope=target.ropes[0],
        max_positions=target.max_positions,
        activation=target.activation,
    )
