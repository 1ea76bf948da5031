"""Mode `distribution`: the p/q rules. The text follows the target's law; which text depends on the draft."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from outrider.core.draft import Draft, Verdict
from outrider.core.errors import RequestError
from outrider.core.host_copy import HostCopy
from outrider.core.sequence import Sequence
from outrider.verify.chain import ChainRule, pad, stated_probs
from outrider.verify.coupled import Seeded, draft_paths, settle, split_rows
from outrider.verify.dice import Dice, RoundDice
from outrider.verify.probs import law, process_logits
from outrider.verify.tree import tree_rule


class Distribution:
    """The verifier of mode `distribution`, with one rule for chains. Greedy requests are judged as in `seeded`."""

    def __init__(self, rule: ChainRule) -> None:
        self._rule = rule
        self._greedy = Seeded()

    def decide(
        self, seqs: Seq[Sequence], drafts: Seq[Draft], logits: Tensor, lengths: Tensor | None = None
    ) -> HostCopy | None:
        greedy = all(seq.params.greedy for seq in seqs)
        return self._greedy.decide(seqs, drafts, logits, lengths) if greedy else None

    def judge(
        self, seqs: Seq[Sequence], drafts: Seq[Draft], logits: Tensor, decided: HostCopy | None = None
    ) -> list[Verdict | RequestError]:
        if all(seq.params.greedy for seq in seqs):
            return self._greedy.judge(seqs, drafts, logits, decided)
        return [
            self._judge_one(seq, draft, rows)
            for seq, draft, rows in zip(seqs, drafts, split_rows(logits, drafts), strict=True)
        ]

    def _judge_one(self, seq: Sequence, draft: Draft, logits: Tensor) -> Verdict | RequestError:
        if seq.params.greedy:  # the rules would say the same, with all weight on one token
            return self._greedy.judge([seq], [draft], logits)[0]
        return settle(decide(seq, draft, logits, self._rule, RoundDice(seq)), logits, 0, seq)


def decide(seq: Sequence, draft: Draft, logits: Tensor, rule: ChainRule, dice: Dice) -> Verdict:
    """Judge one draft given its rows of logits [1 + len(draft), vocab]; all chance comes from `dice`."""
    p = law(process_logits(logits, seq, draft_paths(draft)))  # [1 + len(draft), vocab]
    q = stated_probs(draft, p)  # [len(draft), at least vocab]
    p = pad(p, q.shape[-1])
    if not draft.is_chain:
        path, token = tree_rule(draft, p, q, dice)
        return Verdict((*(draft.tokens[node] for node in path), token), path)
    end = _last_row(p)
    kept, token = rule(draft.tokens[:end], p[: end + 1], q[:end], dice)
    return Verdict((*draft.tokens[:kept], token), tuple(range(kept)))


def _last_row(p: Tensor) -> int:
    """The first row with nothing to choose (NaN), or the last: what lies beyond cannot be text.

    Ending the draft there depends on the tokens before it alone, so it biases nothing.
    """
    bad = p[:, 0].isnan().tolist()
    return bad.index(True) if True in bad else len(bad) - 1
