"""A drafting head's configuration: its sizes, what it reads of the target, and the options of its kind. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outrider.models.config import Activation, RopeConfig

HeadKind = Literal["eagle", "eagle3", "block", "medusa", "mtp", "draft"]
"""draft: no head, but the layers of an ordinary model that is trained to draft."""
_ROPE = RopeConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """One head of any kind. Options of other kinds keep their defaults."""

    kind: HeadKind
    vocab_size: int
    """Of the target."""
    hidden_size: int
    target_hidden_size: int
    target_layers: int = 0
    """Layers of the target; 0: the checkpoint does not say."""
    draft_vocab_size: int = 0
    """Tokens it can draft; 0: the target's whole vocabulary."""
    own_embedding: bool = False
    """Its checkpoint holds an embedding; else it uses the target's."""
    own_head: bool = False
    """Its checkpoint holds an output head; else it uses the target's, or those rows of it that it can draft."""
    taps: tuple[int, ...] = ()
    """Layers of the target whose outputs it reads. Empty: those its kind reads by default, see `check_target`."""

    layers: int = 1
    """Layers that attend."""
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 2
    intermediate_size: int = 1
    norm_eps: float = 1e-6
    rope: RopeConfig = _ROPE
    max_positions: int = 2048
    activation: Activation = "silu"
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    """On the attention's output projection."""
    window: int = 0
    """A row attends to this many last positions, its own included; 0: to all."""

    # EAGLE
    bias: bool = False
    """On `fc`."""
    norm_before_residual: bool = False
    """eagle3: the residual stream begins with the normalized hidden state, not with the hidden state itself."""
    norm_before_fc: bool = False
    """eagle3: one norm over all tapped outputs side by side (`input_norm`)."""
    fc_norm: bool = False
    """eagle3: one norm for each tapped layer (`fc_norm.0`, ...)."""
    norm_output: bool = False
    """eagle3: the next step reads the output after the final norm, not before it (EAGLE-3.1)."""

    # block
    block_size: int = 0
    """Rows of one block, the anchor's included."""
    mask_token_id: int = 0
    """The token whose embedding stands for a token to be drafted, where the checkpoint holds no vector for that."""
    own_mask: bool = False
    """Its checkpoint holds that vector, `mask_embedding` [hidden]."""
    markov_rank: int = 0
    """0: no Markov head."""
    confidence: bool = False
    """A confidence head says how likely each position is to be accepted."""
    confidence_with_markov: bool = False
    """The confidence head also reads the Markov head's embedding of the token before."""
    sample_from_anchor: bool = False
    """The anchor's row predicts the first draft token: as many draft tokens as rows; otherwise one less."""
    causal: bool = False
    """Attention inside a block is causal; otherwise a row sees all rows of its block."""

    # MTP
    hidden_first: bool = False
    """Its projection reads the hidden state before the embedding."""
    raw_hidden: bool = False
    """It reads the target's last hidden state before the target's final norm, not after it."""
    unit_offset: bool = False
    """Norms multiply by 1 + weight (Qwen3-Next)."""

    # Medusa
    medusa_heads: int = 0
    medusa_layers: int = 0
    """Residual layers of each head."""

    @property
    def outputs(self) -> int:
        """Columns of its logits."""
        return self.draft_vocab_size or self.vocab_size
