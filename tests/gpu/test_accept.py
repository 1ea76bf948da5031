"""What a round accepts of its drafts: the plain functions against the verifier, the kernels against the plain ones."""

from __future__ import annotations

import os
import random

import pytest
import torch

from outrider.core.draft import Draft
from outrider.core.sampling import NO_TOKEN
from outrider.kernels import accept
from outrider.verify.seeded import accept_draft

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
SEEDS = range(12)


class Round:
    """Random drafts of one round and the target's choices, most of which accept; `chain`: no trees."""

    def __init__(self, seed: int, *, chain: bool = False) -> None:
        self.rng = rng = random.Random(seed)
        sequences, width = rng.choice([1, 3, 40]), rng.choice([1, 2, 6, 32])
        widths = [rng.randint(1, width) for _ in range(sequences)]
        ids = [[rng.randrange(3) for _ in range(width)] for _ in range(sequences)]
        parents = [[i - 1 if chain else rng.randint(-1, i - 1) for i in range(width - 1)] for _ in range(sequences)]
        self.choices = [[rng.choice([0, 0, 0, 1, 2, NO_TOKEN]) for _ in range(own)] for own in widths]
        for tokens, above, chosen in zip(ids, parents, self.choices, strict=True):
            for node in range(len(chosen) - 1):  # most drafted tokens are right
                if rng.random() < 0.8 and chosen[above[node] + 1] >= 0:
                    tokens[node + 1] = chosen[above[node] + 1]
        self.ids, self.widths = torch.tensor(ids), torch.tensor(widths)
        self.parents = torch.tensor(parents, dtype=torch.int64).view(sequences, width - 1)
        self.starts = torch.tensor([rng.randrange(1000) for _ in range(sequences)])
        self.flat = torch.tensor([token for chosen in self.choices for token in chosen])

    def draft(self, b: int) -> Draft:
        count = int(self.widths[b]) - 1
        return Draft(tuple(self.ids[b, 1 : count + 1].tolist()), tuple(self.parents[b, :count].tolist()))

    def judge(self, b: int) -> tuple[int, list[int], list[int]]:
        """Length, last two tokens and accepted nodes of a sequence, by the verifier."""
        verdict = accept_draft(self.draft(b), self.choices[b])
        tokens, path = list(verdict.tokens), list(verdict.path)
        if tokens[-1] == NO_TOKEN and path:
            tokens.pop()
            path.pop()
        text = [int(self.ids[b, 0]), *tokens]
        return int(self.starts[b]) + len(text), [max(token, 0) for token in text[-2:]], path


@pytest.mark.parametrize("seed", SEEDS)
def test_chains_are_accepted_as_by_the_verifier(seed):
    made = Round(seed, chain=True)
    lengths, last, accepted = accept.accept_chains(made.ids, made.starts, made.widths, made.flat)
    for b in range(len(made.ids)):
        length, tokens, kept = made.judge(b)
        assert (int(lengths[b]), last[b].tolist(), int(accepted[b])) == (length, tokens, len(kept))


@pytest.mark.parametrize("seed", SEEDS)
def test_trees_are_accepted_as_by_the_verifier(seed):
    made = Round(seed)
    lengths, last, path, accepted = accept.accept_trees(made.ids, made.parents, made.starts, made.widths, made.flat)
    assert path.shape == made.parents.shape
    for b in range(len(made.ids)):
        length, tokens, kept = made.judge(b)
        assert (int(lengths[b]), last[b].tolist(), int(accepted[b])) == (length, tokens, len(kept))
        assert path[b].tolist() == kept + [-1] * (path.shape[1] - len(kept))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_chain_as_a_tree_is_accepted_as_a_chain(seed):
    made = Round(seed, chain=True)
    lengths, last, path, accepted = accept.accept_trees(made.ids, made.parents, made.starts, made.widths, made.flat)
    as_chain = accept.accept_chains(made.ids, made.starts, made.widths, made.flat)
    assert torch.equal(lengths, as_chain[0])
    assert torch.equal(last, as_chain[1])
    assert torch.equal(accepted, as_chain[2])
    for b, count in enumerate(accepted.tolist()):
        assert path[b].tolist() == [*range(count)] + [-1] * (path.shape[1] - count)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tree_row_sees_its_ancestors_and_itself(seed):
    made = Round(seed)
    ancestors, depths = accept.tree_rows(made.parents, made.widths - 1)
    assert ancestors.shape == depths.shape == made.ids.shape
    for b, width in enumerate(made.widths.tolist()):
        draft = made.draft(b)
        bits = [1, *(1 | sum(2 << n for n in draft.path(node)) for node in range(len(draft)))]
        bits += [(2 << w) - 1 for w in range(width, made.ids.shape[1])]
        assert ancestors[b].tolist() == bits
        assert depths[b].tolist() == [0, *draft.depths(), *range(width, made.ids.shape[1])]


def test_a_parent_out_of_range_counts_as_the_node_before():
    broken = torch.tensor([[-2, 1, 0, 99, -7, 3]])
    mended = torch.tensor([[-1, 0, 0, 2, 3, 3]])
    counts, ids, zeros = torch.tensor([6]), torch.zeros(1, 7, dtype=torch.int64), torch.zeros(7, dtype=torch.int64)
    for name, before, after in (
        ("tree_rows", (), (counts,)),
        ("accept_trees", (ids,), (torch.tensor([4]), counts + 1, zeros)),
    ):
        plain = getattr(accept, name)
        pairs = zip(plain(*before, broken, *after), plain(*before, mended, *after), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), name


def test_of_equal_siblings_the_last_is_accepted():
    ids, parents = torch.tensor([[4, 7, 7, 8]]), torch.tensor([[-1, -1, 1]])
    choices = torch.tensor([7, 0, 8, 9])
    lengths, last, path, accepted = accept.accept_trees(ids, parents, torch.tensor([5]), torch.tensor([4]), choices)
    assert (lengths.tolist(), last.tolist()) == ([9], [[8, 9]])
    assert (path.tolist(), accepted.tolist()) == ([[1, 2, -1]], [2])


def moved(made: Round, layers: int, module, device: str, dtype=torch.float32):
    """Random caches before and after `compact_kept` of a round's accepted nodes; pages of 4 tokens."""
    _, _, path, accepted = accept.accept_trees(made.ids, made.parents, made.starts, made.widths, made.flat)
    g = torch.Generator().manual_seed(made.rng.randrange(1 << 30))
    count, pages = len(made.ids), 1040 // 4
    block_tables = torch.randperm(count * pages + 2, generator=g)[2:].view(count, pages).int()
    table_ids = torch.randperm(count, generator=g)
    shape = (layers, (count * pages + 2) * 4, 2, 8)
    caches = [torch.randn(shape[layers == 0 :], generator=g).to(dtype) for _ in range(2)]
    after = [cache.clone().to(device) for cache in caches]
    where = (t.to(device) for t in (block_tables, table_ids, made.starts, path, accepted))
    module.compact_kept(*after, *where, page=4)
    return caches, [cache.cpu() for cache in after], block_tables[table_ids], path, accepted


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("layers", [0, 3])
def test_accepted_nodes_are_moved_to_where_a_chain_has_them(seed, layers):
    made = Round(seed)
    before, after, tables, path, accepted = moved(made, layers, accept, "cpu")
    for cache, result in zip(before, after, strict=True):
        expected = cache.clone()
        for b, count in enumerate(accepted.tolist()):

            def slot(node: int, b: int = b) -> int:
                page, within = divmod(int(made.starts[b]) + 1 + node, 4)
                return int(tables[b, page]) * 4 + within

            for d in range(count):
                expected[..., slot(d), :, :] = cache[..., slot(int(path[b, d])), :, :]
        assert torch.equal(result, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("chain", [False, True])
def test_the_kernels_accept_as_the_plain_functions(seed, chain):
    from outrider.kernels import triton_accept

    made = Round(seed, chain=chain)
    given = {
        "accept_chains": (made.ids, made.starts, made.widths, made.flat),
        "tree_rows": (made.parents, made.widths - 1),
        "accept_trees": (made.ids, made.parents, made.starts, made.widths, made.flat),
    }
    for name, arguments in given.items():
        plain = getattr(accept, name)(*arguments)
        there = getattr(triton_accept, name)(*(t.to(DEVICE) for t in arguments))
        assert len(plain) == len(there)
        assert all(torch.equal(a, b.cpu()) and a.dtype == b.dtype for a, b in zip(plain, there, strict=True)), name


@pytest.mark.gpu
@pytest.mark.parametrize("seed", SEEDS)
def test_the_kernels_read_nothing_out_of_range(seed):
    from outrider.kernels import triton_accept

    made = Round(seed)
    g = torch.Generator().manual_seed(seed)
    parents = torch.randint(-40, 40, made.parents.shape, generator=g)
    for name, arguments in (
        ("tree_rows", (parents, made.widths - 1)),
        ("accept_trees", (made.ids, parents, made.starts, made.widths, made.flat)),
    ):
        there = getattr(triton_accept, name)(*(t.to(DEVICE) for t in arguments))
        plain = getattr(accept, name)(*arguments)
        assert all(torch.equal(a, b.cpu()) for a, b in zip(plain, there, strict=True)), name


@pytest.mark.gpu
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("layers", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_moves_what_the_plain_function_moves(seed, layers, dtype):
    from outrider.kernels import triton_accept

    _, plain, *_ = moved(Round(seed), layers, accept, "cpu", dtype)
    _, there, *_ = moved(Round(seed), layers, triton_accept, DEVICE, dtype)
    assert all(torch.equal(a, b) for a, b in zip(plain, there, strict=True))


@pytest.mark.gpu
def test_what_the_kernels_cannot_take_is_refused():
    from outrider.kernels import triton_accept

    for parents in (torch.zeros(257, 3).long(), torch.zeros(2, 32).long(), torch.zeros(3, 8).long().t()):
        with pytest.raises(ValueError, match="at most 256 sequences of 32 rows"):
            triton_accept.tree_rows(parents.to(DEVICE), torch.ones(len(parents)).long().to(DEVICE))
