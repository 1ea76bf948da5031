"""The contract of a verifier, and how the name of a mode becomes one."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Literal, Protocol

from torch import Tensor

from outrider.core.draft import Draft, Verdict
from outrider.core.draws import Draws
from outrider.core.errors import ConfigError, RequestError
from outrider.core.host_copy import HostCopy
from outrider.core.sequence import Sequence
from outrider.verify.chain_rules import ChainRule, block_rule, token_rule
from outrider.verify.distribution import DistributionVerifier
from outrider.verify.probs import Positions
from outrider.verify.seeded import SeededVerifier

Mode = Literal["seeded", "distribution"]
Rule = Literal["block", "token"]


class Verifier(Protocol):
    """Decides how many tokens of each draft are accepted, and adds the target's own next token.

    Rows of logits come sequence by sequence, 1 + len(draft) each: the row after the last token
    of the text, then the row after each node of the draft, in order.
    """

    def decide(
        self, seqs: Seq[Sequence], drafts: Seq[Draft], logits: Tensor, positions: Positions | None = None
    ) -> HostCopy | None:
        """Launch the target's choice for each row of logits [N, vocab]: int64 [N].

        None where choices depend on the drafts' probabilities: mode `distribution` with sampling.

        positions() returns int64 [N] on the device of the logits: for each row, the position in the text of the token
        that follows it. It is called only where some sequence samples. With it, the tokens and parents of a draft are
        read only where options of its sequence depend on the text, so drafts may still be on the device. Without it,
        positions follow from the host's sequences and drafts.
        """
        ...

    def draws(self, seqs: Seq[Sequence]) -> Draws | None:
        """What a pass needs to make these sequences' choices itself, in place of `decide`; None where it cannot."""
        ...

    def judge(
        self, seqs: Seq[Sequence], drafts: Seq[Draft], logits: Tensor, decided: HostCopy | None = None
    ) -> list[Verdict | RequestError]:
        """Judge drafts[i] of seqs[i] by the target's raw logits [N, vocab]. Changes nothing.

        Each sequence is judged as if it were alone in the batch. Where no token can be chosen
        right after the text (NaN logits, or all tokens masked), its entry is a RequestError. Where
        none can be chosen further down the draft, the verdict ends before that place and the next
        round fails there. Rows that are not reached have no effect. decided: what `decide` returned
        for this round.
        """
        ...


RULES: dict[str, ChainRule] = {"block": block_rule, "token": token_rule}
VERIFIERS: dict[str, Callable[[ChainRule], Verifier]] = {
    "seeded": lambda _: SeededVerifier(),
    "distribution": DistributionVerifier,
}


def make_verifier(mode: Mode, rule: Rule = "block") -> Verifier:
    """The verifier of a mode. `rule` is how mode `distribution` judges chains; mode `seeded` ignores it."""
    if mode not in VERIFIERS:
        raise ConfigError(f"no verification mode called {mode!r}; choose one of: {', '.join(VERIFIERS)}")
    if rule not in RULES:
        raise ConfigError(f"no verification rule called {rule!r}; choose one of: {', '.join(RULES)}")
    return VERIFIERS[mode](RULES[rule])
