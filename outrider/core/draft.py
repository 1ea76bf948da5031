"""What is drafted, and what the target made of it. Data only."""

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

    Node i follows node parents[i]; -1 is the text's last token. Parents come before
    their children. Without parents, each node follows the one before it. Siblings
    hold different tokens.

    Tokens and parents may be `DeviceRow`s: made on a device and still there. Their
    number is known; reading them waits for them. The tokens of a chain may be padded,
    see `DeviceRow`: so many rows are scored, and what is padding is never accepted.
    """

    tokens: Seq[Token] = ()
    parents: Seq[int] | None = None
    probs: Tensor | None = None
    """[len(tokens), vocab]: the distribution each token was drawn from; None: certain of each token.

    In a tree, the distribution at the node's parent before any sibling was drawn.
    """
    source: str = ""
    """The drafter's registered name."""
    expected: float = 0.0
    """How many of these tokens the drafter expects to be accepted; what `mix` compares."""
    known: bool = False
    """Every token is in the target's vocabulary and every parent precedes its child: it need not be checked."""
    confidence: ConfidenceRow | None = None
    """Of a chain: how sure of each token the drafter is; None: it does not say.

    Only later drafts may depend on it, or in mode `seeded` what of the drafts of a round is scored: there no draft
    changes a text. Elsewhere what is scored must not depend on what was drawn.
    """
    share: int | None = None
    """Of a padded chain that shares the rows of its pass with others: the tokens that the pass is chosen for on its
    behalf. How many of its own are scored only the device knows. None: it shares nothing."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def scored(self) -> int:
        """Tokens that are scored for it, on average over the drafts that share rows."""
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
        """Whether it is a chain on a device that states nothing but its tokens: a pass reads them there."""
        plain = self.parents is None and self.probs is None and self.confidence is None
        return plain and self.known and isinstance(self.tokens, DeviceRow) and len(self.tokens) > 0

    def again(self, block: HostCopy) -> Draft:
        """One like it, of which `is_fetched` holds, whose tokens are at the same place of this block."""
        row = cast(DeviceRow, self.tokens)
        tokens = DeviceRow(block, row.row, len(row), padded=row.padded)
        return Draft(tokens, None, None, self.source, self.expected, True, None, self.share)

    def without_padding(self) -> Draft:
        """The draft as the device made it. Waits for it where its tokens are padded."""
        if not self.tokens or not isinstance(self.tokens, DeviceRow) or not self.tokens.padded:
            return self
        tokens = self.tokens.without_padding()
        return (
            Draft(tokens, None, self.probs, self.source, self.expected, self.known, self.confidence)
            if tokens
            else EMPTY
        )

    def first_chain(self) -> Draft:
        """The chain of first children: what a runner that scores no trees can check."""
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
    """How many tokens of a draft a text that came agrees with; None where that is open yet."""
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
    """What the target made of a draft: the accepted tokens, then one of its own."""

    tokens: tuple[Token, ...]
    path: tuple[int, ...] = ()
    """The accepted nodes of the draft, in order; tokens has one more."""

    @property
    def accepted(self) -> int:
        return len(self.path)
