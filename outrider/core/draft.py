"""A draft, and the target's verdict on it. Data only."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

from torch import Tensor

from outrider.core.device_row import ConfidenceRow, DeviceRow
from outrider.core.host_copy import HostCopy
from outrider.core.sampling import Token

TokenPath = tuple[Token, ...]  # draft tokens from the first level of a draft down to one of its nodes


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed to come next: a chain, or a tree. Empty is always a legal draft.

    Node i follows node parents[i]; -1 is the text's last token. Parents come before their children. Without parents,
    each node follows the one before it. Siblings hold different tokens.

    Tokens and parents may be `DeviceRow`s, computed on a device: their number is known, and reading them waits for the
    copy to the host. The tokens of a chain may be padded, see `DeviceRow`. Padding is scored too, unless drafts share
    rows (`share`), and is never accepted.
    """

    tokens: Seq[Token] = ()
    parents: Seq[int] | None = None
    probs: Tensor | None = None
    """[len(tokens), vocab]: the distribution each token was drawn from; None: each token counts as certain.

    In a tree, the distribution at the node's parent before any sibling was drawn.
    """
    source: str = ""
    """The drafter's registered name."""
    expected: float = 0.0
    """The number of these tokens that the drafter expects to be accepted; `mix` compares drafts by it."""
    known: bool = False
    """Every token is in the target's vocabulary and every parent precedes its child: the draft need not be checked."""
    confidence: ConfidenceRow | None = None
    """For a chain, the drafter's confidence in each token; None: the drafter states none.

    Later drafts may depend on it. In mode `seeded`, what is scored of the drafts of a round may, too, since no draft
    changes a text there. In mode `distribution`, what is scored must not depend on what was drawn.
    """
    share: int | None = None
    """For a padded chain that shares the rows of its pass with other drafts: the number of tokens counted for it when
    the pass's shape is chosen. Only the device knows how many of its tokens are scored. None: no sharing."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def scored(self) -> int:
        """The number of tokens scored for this draft; where drafts share rows, the share counted for it."""
        return len(self.tokens) if self.share is None else self.share

    @property
    def is_chain(self) -> bool:
        return self.parents is None or all(p == i - 1 for i, p in enumerate(self.parents))

    def parent(self, node: int) -> int:
        return node - 1 if self.parents is None else self.parents[node]

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from the first level down to this one."""
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = self.parent(node)
        return tuple(reversed(nodes))

    def depths(self) -> tuple[int, ...]:
        """How far each node lies beyond the text: 1 at the first level."""
        if self.parents is None:
            return tuple(range(1, len(self.tokens) + 1))
        out: list[int] = []
        for p in self.parents:
            out.append(1 if p < 0 else out[p] + 1)
        return tuple(out)

    def children(self, node: int) -> list[int]:
        if self.parents is None:
            return [node + 1] if node + 1 < len(self.tokens) else []
        return [i for i in range(node + 1, len(self.tokens)) if self.parent(i) == node]

    def first_nodes(self, count: int) -> Draft:
        """The draft cut to its first `count` nodes; still a tree, since parents come first."""
        if count >= len(self.tokens):
            return self
        return replace(
            self,
            share=None if self.share is None else min(self.share, count),
            tokens=self.tokens[:count],
            parents=None if self.parents is None else self.parents[:count],
            probs=None if self.probs is None else self.probs[:count],
        )

    @property
    def is_fetched(self) -> bool:
        """Whether this is a chain on a device whose tokens count as certain, so that a pass reads them there."""
        plain = self.parents is None and self.probs is None
        return plain and self.known and isinstance(self.tokens, DeviceRow) and len(self.tokens) > 0

    def again(self, block: HostCopy) -> Draft:
        """A copy of this draft, for which `is_fetched` holds, with its tokens at the same place of another block."""
        row = cast(DeviceRow, self.tokens)
        tokens = DeviceRow(block, row.row, len(row), padded=row.padded)
        return Draft(tokens, None, None, self.source, self.expected, True, None, self.share)

    def without_padding(self) -> Draft:
        """The draft without its padding. Waits for the copy where the tokens are padded."""
        if not self.tokens or not isinstance(self.tokens, DeviceRow) or not self.tokens.padded:
            return self
        tokens = self.tokens.without_padding()
        return (
            Draft(tokens, None, self.probs, self.source, self.expected, self.known, self.confidence)
            if tokens
            else EMPTY
        )

    def first_chain(self) -> Draft:
        """The chain of first children, for a runner that scores no trees."""
        if self.is_chain:
            return self
        nodes: list[int] = []
        while children := self.children(nodes[-1] if nodes else -1):
            nodes.append(children[0])
        return replace(
            self,
            tokens=tuple(self.tokens[i] for i in nodes),
            parents=None,
            probs=None if self.probs is None else self.probs[list(nodes)],
        )


EMPTY = Draft()


def accepted_by(draft: Draft, text: Seq[Token]) -> int | None:
    """The number of draft tokens that agree with the text that followed; None while that text is too short to tell."""
    children = draft.children(-1)
    for accepted, token in enumerate(text):
        node = next((child for child in children if draft.tokens[child] == token), None)
        if node is None:
            return accepted
        children = draft.children(node)
        if not children:
            return accepted + 1
    return None


class Verdict(NamedTuple):
    """The target's verdict on a draft: the accepted tokens, then one token of the target's own."""

    tokens: tuple[Token, ...]
    path: tuple[int, ...] = ()
    """The accepted nodes of the draft, in order; `tokens` has one more."""

    @property
    def accepted(self) -> int:
        return len(self.path)
