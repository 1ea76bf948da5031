"""The verifier's contract, and the one place where a mode's name becomes a verifier."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Literal, Protocol

from torch import Tensor

from outrider.core.draft import Draft, Verdict
from outrider.core.errors import ConfigError, RequestError
from outrider.core.host_copy import HostCopy
from outrider.core.sequence import Sequence
from outrider.verify.chain import ChainRule, block_rule, token_rule
from outrider.verify.coupled import Seeded
from outrider.verify.distribution import Distribution

Mode = Literal["seeded", "distribution"]
Rule = Literal["block", "token"]


class Verifier(Protocol):
    """Decides how much of each draft stands, and adds the target's own next token."""

    def decide(
        self, seqs: Seq[Sequence], drafts: Seq[Draft], logits: Tensor, lengths: Tensor | None = None
    ) -> HostCopy | None:
        """Launch the target's own choice after each row, int64 [N]; None where choices depend on the drafts' laws.

        lengths int64 [len(seqs)]: the tokens of each text where only the device knows them, as in
        a round that follows one in flight. Then no option may look at the text.
        """
        ...

    def judge(
        self, seqs: Seq[Sequence], drafts: Seq[Draft], logits: Tensor, decided: HostCopy | None = None
    ) -> list[Verdict | RequestError]:
        """Judge drafts[i] of seqs[i] by the target's raw logits [N, vocab]. Changes nothing.

        Rows come sequence by sequence, 1 + len(draft) each: after the last text token, then
        after each node in order. Each sequence is judged as if it were alone. Where nothing can
        be chosen after the text itself (NaN logits, or all tokens ruled out), a RequestError
        stands in the sequence's place. Where that is so further down, the verdict ends before
        it and the next round fails; rows that are not reached do not matter. decided: what
        `decide` launched for this very round.
        """
        ...


RULES: dict[str, ChainRule] = {"block": block_rule, "token": token_rule}
VERIFIERS: dict[str, Callable[[ChainRule], Verifier]] = {
    "seeded": lambda _: Seeded(),
    "distribution": Distribution,
}


def make_verifier(mode: Mode, rule: Rule = "block") -> Verifier:
    """The verifier of a mode. `rule` is how mode `distribution` judges chains; `seeded` has one rule for all."""
    if mode not in VERIFIERS:
        raise ConfigError(f"no verification mode called {mode!r}; choose one of: {', '.join(VERIFIERS)}")
    if rule not in RULES:
        raise ConfigError(f"no verification rule called {rule!r}; choose one of: {', '.join(RULES)}")
    return VERIFIERS[mode](RULES[rule])
