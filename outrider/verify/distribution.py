"""Mode `distribution`: rejection sampling. Texts follow the target's distribution; the draft influences which one."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from outrider.core.draft import Draft, Verdict
from outrider.core.draws import Draws
from outrider.core.errors import RequestError
from outrider.core.host_copy import HostCopy
from outrider.core.sequence import Sequence
from outrider.verify.chain_rules import ChainRule, pad_probs, stated_probs
from outrider.verify.probs import Positions, probs_of, process_logits
from outrider.verify.rng import Rng, RoundRng
from outrider.verify.seeded import SeededVerifier, draft_paths, drop_missing_token
from outrider.verify.tree_rule import tree_rule


class DistributionVerifier:
    """The verifier of mode `distribution`, with one rule for chains. Greedy requests are judged as in `seeded`."""

    def __init__(self, rule: ChainRule) -> None:
        self._rule = rule
        self._greedy = SeededVerifier()

    def decide(
        self, seqs: Seq[Sequence], drafts: Seq[Draft], logits: Tensor, positions: Positions | None = None
    ) -> HostCopy | None:
        greedy = all(seq.params.greedy for seq in seqs)
        return self._greedy.decide(seqs, drafts, logits, positions) if greedy else None

    def draws(self, seqs: Seq[Sequence]) -> Draws | None:
        return None

    def judge(
        self, seqs: Seq[Sequence], drafts: Seq[Draft], logits: Tensor, decided: HostCopy | None = None
    ) -> list[Verdict | RequestError]:
        if all(seq.params.greedy for seq in seqs):
            return self._greedy.judge(seqs, drafts, logits, decided)
        rows = logits.split([1 + len(draft) for draft in drafts])
        return [self._judge_one(*each) for each in zip(seqs, drafts, rows, strict=True)]

    def _judge_one(self, seq: Sequence, draft: Draft, logits: Tensor) -> Verdict | RequestError:
        if seq.params.greedy:  # the rules give the same, with all probability on one token
            return self._greedy.judge([seq], [draft], logits)[0]
        return drop_missing_token(judge_draft(seq, draft, logits, self._rule, RoundRng(seq)), logits, 0, seq)


def judge_draft(seq: Sequence, draft: Draft, logits: Tensor, rule: ChainRule, rng: Rng) -> Verdict:
    """Judge one draft by its rows of logits [1 + len(draft), vocab]; all randomness comes from `rng`."""
    p = probs_of(process_logits(logits, seq, draft_paths(draft)))  # [1 + len(draft), vocab]
    q = stated_probs(draft, p)  # [len(draft), at least vocab]
    p = pad_probs(p, q.shape[-1])
    if not draft.is_chain:
        path, token = tree_rule(draft, p, q, rng)
        return Verdict((*(draft.tokens[node] for node in path), token), path)
    end = _last_row(p)
    accepted, token = rule(draft.tokens[:end], p[: end + 1], q[:end], rng)
    return Verdict((*draft.tokens[:accepted], token), tuple(range(accepted)))


def _last_row(p: Tensor) -> int:
    """The first row without a token to choose (NaN), or the last row: no row beyond it can be reached.

    Cutting the draft there depends only on the tokens before it, so it does not bias the text.
    """
    bad = p[:, 0].isnan().tolist()
    return bad.index(True) if True in bad else len(bad) - 1
