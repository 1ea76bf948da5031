"""Chains and trees of a block, against an enumeration of every path."""

from __future__ import annotations

import itertools

import pytest
import torch

from outrider.core.draft import Draft, Verdict
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.verify.block_sampling import BlockLogits, draft_chain, draft_tree, draw_chain
from outrider.verify.noise import DRAFT, ROUND, gumbel, keys_at
from outrider.verify.seeded import SeededVerifier

VOCAB, COLUMNS, LEVELS = 11, 6, 3
TOKENS = torch.tensor([0, 2, 3, 7, 8, 10])


def block(temperatures: list[float], *, markov: bool = True, seed: int = 0) -> BlockLogits:
    g, batch = torch.Generator().manual_seed(seed), len(temperatures)
    return BlockLogits(
        torch.randn(batch, LEVELS, COLUMNS, generator=g) * 2,
        torch.randint(0, VOCAB, (batch,), generator=g),
        torch.randint(2, 40, (batch,), generator=g),
        torch.randint(0, 1 << 40, (batch,), generator=g),
        torch.tensor(temperatures, dtype=torch.float64),
        VOCAB,
        TOKENS,
        (torch.randn(VOCAB, 4, generator=g), torch.randn(COLUMNS, 4, generator=g)) if markov else None,
    )


def log_probs(given: BlockLogits, b: int, level: int, before: int, *, noisy: bool) -> torch.Tensor:
    """float64 [COLUMNS]: log softmax of one row's logits / T, with the target's noise where asked for."""
    row = given.rows[b, level].double()
    if given.markov is not None:
        row = row + given.markov[1].double() @ given.markov[0][before].double()
    temperature = float(given.temperatures[b])
    if temperature:
        row = row / temperature
        if noisy:
            row = row + gumbel(int(given.seeds[b]), int(given.lengths[b]) + level, VOCAB)[TOKENS]
    return row.log_softmax(-1)


@pytest.mark.parametrize("markov", [True, False])
@pytest.mark.parametrize("nodes", [1, 5, 8])
def test_a_tree_is_the_likeliest_of_all_paths(nodes: int, markov: bool):
    given = block([0.0, 1.0, 0.5, 0.0], markov=markov)
    tokens, parents = draft_tree(given, nodes)
    for b in range(4):
        scores: dict[tuple[int, ...], float] = {}
        for depth in range(1, LEVELS + 1):
            for path in itertools.product(range(COLUMNS), repeat=depth):
                before = int(given.last[b]) if depth == 1 else int(TOKENS[path[-2]])
                own = float(log_probs(given, b, depth - 1, before, noisy=True)[path[-1]])
                scores[path] = scores.get(path[:-1], 0.0) + own
        best = sorted(scores, key=lambda path: scores[path], reverse=True)[:nodes]
        made: list[tuple[int, ...]] = []
        for token, parent in zip(tokens[b].tolist(), parents[b].tolist(), strict=True):
            made.append((*(made[parent] if parent >= 0 else ()), token))
        assert made == [tuple(int(TOKENS[column]) for column in path) for path in best]


def test_a_chain_takes_the_best_token_after_the_one_before():
    given = block([0.0, 1.0, 0.5])
    for b, chain in enumerate(draft_chain(given)[0].tolist()):
        before = int(given.last[b])
        for level, token in enumerate(chain):
            assert token == int(TOKENS[log_probs(given, b, level, before, noisy=True).argmax()])
            before = token


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_block_that_knows_the_target_is_accepted_as_far_as_it_goes(temperature: float):
    """The target's logits depend on the last token alone, and the Markov head has them: chains are accepted whole.

    Of a tree, the beginning of that chain that it holds is accepted.
    """
    count, params = 12, SamplingParams(temperature=temperature)
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) * 2  # [what follows, token]
    seqs = [Sequence(i, [i % VOCAB] * (2 + i), 1, params, seed=70 + i) for i in range(count)]
    given = BlockLogits(
        torch.zeros(count, LEVELS, VOCAB),
        torch.tensor([seq.tokens[-1] for seq in seqs]),
        torch.tensor([len(seq.tokens) for seq in seqs]),
        torch.tensor([seq.seed for seq in seqs]),
        torch.full((count,), temperature, dtype=torch.float64),
        VOCAB,
        markov=(torch.eye(VOCAB), table),
    )
    chains = draft_chain(given)[0].tolist()
    tokens, parents = draft_tree(given, 12)
    trees = [Draft(*rows) for rows in zip(tokens.tolist(), parents.tolist(), strict=True)]
    for drafts in ([Draft(chain) for chain in chains], trees):
        read = [token for seq, draft in zip(seqs, drafts, strict=True) for token in (seq.tokens[-1], *draft.tokens)]
        verdicts = SeededVerifier().judge(seqs, drafts, table.T[read])
        for draft, chain, verdict in zip(drafts, chains, verdicts, strict=True):
            held = {tuple(draft.tokens[node] for node in draft.path(i)) for i in range(len(draft))}
            depth = max((d for d in range(LEVELS + 1) if tuple(chain[:d]) in held), default=0)
            assert isinstance(verdict, Verdict)
            assert len(verdict.path) == depth
            assert list(verdict.tokens[:depth]) == chain[:depth]
            assert depth == LEVELS or draft.parents is not None


def test_a_drawn_chain_states_what_it_was_drawn_from():
    given = block([1.0, 0.7, 0.0])
    tokens, probs = draw_chain(given)
    keys = keys_at(given.seeds, given.lengths, ROUND)
    for b, chain in enumerate(tokens.tolist()):
        before = int(given.last[b])
        for level, token in enumerate(chain):
            q = log_probs(given, b, level, before, noisy=False)
            expected = torch.zeros(VOCAB, dtype=torch.float64)
            expected[TOKENS] = q.exp()
            assert torch.allclose(probs[b, level], expected, atol=1e-6)
            noise = gumbel(int(keys[b]) % (1 << 64), int(given.lengths[b]) + level, VOCAB, stream=DRAFT)[TOKENS]
            assert token == int(TOKENS[(q + noise * bool(given.temperatures[b])).argmax()])
            before = token


def test_draws_follow_their_probabilities():
    """Many seeds of one block: the share of each first token."""
    count = 20_000
    one = block([1.0])
    many = BlockLogits(
        one.rows.expand(count, -1, -1), one.last.expand(count), one.lengths.expand(count), torch.arange(count),
        one.temperatures.expand(count), VOCAB, TOKENS, one.markov,
    )  # fmt: skip
    tokens, probs = draw_chain(many)
    shares = torch.bincount(tokens[:, 0], minlength=VOCAB) / count
    assert float((shares - probs[0, 0]).abs().max()) < 5 * (0.25 / count) ** 0.5
