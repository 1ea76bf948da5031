"""Chains and trees of blocks by the Triton kernels, against the plain ones of verify/block_sampling.py."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from outrider.verify.block_sampling import TREE_WIDTH, BlockLogits, draft_chain, draft_tree

pytestmark = pytest.mark.gpu
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
HALF = torch.float16 if DEVICE == "cpu" else torch.bfloat16  # the interpreter reads bfloat16 wrongly
CASES = [  # sequences, levels, columns, rank, whole vocabulary
    (1, 3, 70, 0, 70),
    (3, 4, 300, 6, 500),
    (5, 2, 1100, 32, 1100),
    (2, 2, 3000, 700, 3000),
]
if DEVICE == "cuda":
    CASES += [(1, 7, 8192, 32, 49152), (8, 7, 32000, 256, 128256), (33, 5, 49152, 64, 49152)]


def random_block(batch: int, levels: int, columns: int, rank: int, vocab: int) -> BlockLogits:
    g = torch.Generator().manual_seed(columns)
    tokens = None if columns == vocab else torch.randperm(vocab, generator=g)[:columns].sort().values
    w1, w2 = torch.randn(vocab, max(1, rank), generator=g), torch.randn(columns, max(1, rank), generator=g)
    return BlockLogits(
        torch.randn(batch, levels, columns, generator=g) * 3,
        torch.randint(0, vocab, (batch,), generator=g),
        torch.randint(2, 4000, (batch,), generator=g),
        torch.randint(-(2**62), 2**62, (batch,), generator=g),
        torch.tensor([0.0, 1.0, 0.6, 0.0, 1.7])[torch.arange(batch) % 5].double(),
        vocab,
        tokens,
        (w1.to(HALF), w2.to(HALF)) if rank else None,
    )


def by_kernel(block: BlockLogits, nodes: int = 0) -> tuple[Tensor, Tensor | None]:
    from outrider.kernels.triton_block import draft_blocks

    given = [
        tuple(part.to(DEVICE) for part in each)
        if isinstance(each, tuple)
        else each
        if each is None
        else each.to(DEVICE)
        for each in block._replace(rows=block.rows.clone()).kernel_arguments()
    ]
    made = draft_blocks(*given, nodes=nodes, width=TREE_WIDTH if nodes else 1, pdl=DEVICE == "cuda")
    return made[0].cpu(), None if made[1] is None else made[1].cpu()


def in_float(block: BlockLogits) -> BlockLogits:
    """With the same weights in float32: the plain bias is then as exact as the kernel's."""
    return block if block.markov is None else block._replace(markov=(block.markov[0].float(), block.markov[1].float()))


@pytest.mark.parametrize("case", CASES)
def test_chains_are_those_of_the_plain_rule(case: tuple[int, ...]):
    block = random_block(*case)
    tokens, parents = by_kernel(block)
    assert parents is None
    assert tokens.tolist() == draft_chain(in_float(block)).tolist()


@pytest.mark.parametrize("nodes", [1, 9, 24])
@pytest.mark.parametrize("case", CASES)
def test_trees_are_those_of_the_plain_rule(case: tuple[int, ...], nodes: int):
    block = random_block(*case)
    tokens, parents = by_kernel(block, nodes)
    expected = draft_tree(in_float(block), nodes)
    assert parents is not None
    assert (tokens.tolist(), parents.tolist()) == (expected[0].tolist(), expected[1].tolist())


@pytest.mark.parametrize("nodes", [0, 12])
def test_rows_that_are_no_numbers_give_tokens_all_the_same(nodes: int):
    """And no siblings alike, no parent behind its child."""
    block = random_block(3, 4, 300, 6, 500)
    block.rows[1] = torch.nan
    block.rows[2, 1:] = -torch.inf
    tokens, parents = by_kernel(block, nodes)
    assert block.tokens is not None
    assert set(tokens.flatten().tolist()) <= set(block.tokens.tolist())
    if parents is not None:
        for own, above in zip(tokens.tolist(), parents.tolist(), strict=True):
            assert all(-1 <= parent < node for node, parent in enumerate(above))
            assert len(set(zip(above, own, strict=True))) == len(own)
