"""Chains and trees of blocks by the Triton kernels, against the plain ones of verify/block_sampling.py."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.verify.block_sampling import TREE_WIDTH, BlockLogits, ConfidenceLayer, draft_chain, draft_tree

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


def on_device(block: BlockLogits) -> list[Any]:
    """The kernels' arguments."""
    given = block._replace(rows=block.rows.clone()).kernel_arguments()
    return [None if each is None else _moved(each) for each in given]


def _moved(given: Tensor | tuple[Tensor, ...]) -> Any:
    return given.to(DEVICE) if isinstance(given, Tensor) else tuple(part.to(DEVICE) for part in given)


def chains_of(block: BlockLogits) -> Tensor:
    from outrider.kernels.triton_chain import draft_chains

    made, chances = draft_chains(*on_device(block), pdl=DEVICE == "cuda")
    assert chances is None
    return made.cpu()


def trees_of(block: BlockLogits, nodes: int) -> tuple[Tensor, Tensor]:
    from outrider.kernels.triton_block import draft_trees

    tokens, parents = draft_trees(*on_device(block), nodes=nodes, width=TREE_WIDTH, pdl=DEVICE == "cuda")
    return tokens.cpu(), parents.cpu()


def in_float(block: BlockLogits) -> BlockLogits:
    """With the same weights in float32: the plain bias is then as exact as the kernel's."""
    return block if block.markov is None else block._replace(markov=(block.markov[0].float(), block.markov[1].float()))


@pytest.mark.parametrize("case", [*CASES, (35, 2, 200, 4, 300)])
def test_chains_are_those_of_the_plain_rule(case: tuple[int, ...]):
    block = random_block(*case)
    assert chains_of(block).tolist() == draft_chain(in_float(block))[0].tolist()


def test_a_part_of_each_row_may_be_given():
    block = random_block(3, 4, 300, 6, 500)
    first = block._replace(rows=block.rows[:, :2])
    assert chains_of(first).tolist() == chains_of(block)[:, :2].tolist()


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("value", [-3.0, 0.0, 5.5, torch.inf])
def test_of_equal_columns_a_chain_takes_the_first(value: float, named: bool):
    """In any part of the vocabulary; -0 equals 0, and columns need not be in the order of their tokens."""
    rows = torch.full((18, 3, 900), -7.0)
    ids = torch.randperm(2000, generator=torch.Generator().manual_seed(1))[:900]
    block = random_block(18, 3, 900, 0, 900)._replace(temperatures=torch.zeros(18, dtype=torch.float64))
    block = block._replace(rows=rows, tokens=ids if named else None, vocab=2000 if named else 900)
    firsts = torch.arange(18 * 3).view(18, 3) * 13
    for row, first in zip(rows.view(-1, 900), firsts.flatten().tolist(), strict=True):
        row[first] = -value if value == 0 else value
        row[[first + 1, first + 70, 899]] = value
    expected = block.token_of(firsts)
    assert draft_chain(block)[0].tolist() == expected.tolist()
    assert chains_of(block).tolist() == expected.tolist()


@pytest.mark.parametrize("case", [(1, 3, 70, 0, 70), (18, 4, 300, 6, 500)])
@pytest.mark.parametrize("reads_token", [False, True])
def test_confidences_are_those_of_the_plain_layer(case: tuple[int, ...], reads_token: bool):
    from outrider.kernels.triton_chain import draft_chains

    block, g = random_block(*case), torch.Generator().manual_seed(2)
    batch, levels = block.rows.shape[:2]
    rank = case[3] if reads_token else 0
    whole, weight = torch.randn(batch, levels + 1, 40, generator=g), torch.randn(40 + rank, generator=g)
    hidden, bias = whole.to(HALF)[:, 1:], torch.tensor([0.3])
    given = ConfidenceLayer(*(part.to(DEVICE) for part in (hidden, weight.to(HALF), bias.to(HALF))))
    tokens, chances = draft_chains(*on_device(block), confidence=given, pdl=DEVICE == "cuda")
    assert chances is not None
    chain, _ = draft_chain(in_float(block))
    assert tokens.tolist() == chain.tolist()
    read = hidden.float()
    if rank and block.markov is not None:
        before = torch.cat([block.last[:, None], chain[:, :-1]], 1)
        read = torch.cat([read, block.markov[0].float()[before]], -1)
    expected = torch.sigmoid(read @ weight.to(HALF).float() + bias.to(HALF).float())
    assert torch.allclose(chances.cpu(), expected, atol=1e-5)


def test_results_are_written_where_the_caller_says():
    from outrider.kernels.triton_chain import draft_chains

    block = random_block(3, 4, 300, 6, 500)
    out = torch.zeros(3, 4, dtype=torch.int64, device=DEVICE)
    made, _ = draft_chains(*on_device(block), out=(out, None), pdl=DEVICE == "cuda")
    assert made is out
    assert out.tolist() == draft_chain(in_float(block))[0].tolist()


@pytest.mark.parametrize("nodes", [1, 9, 24])
@pytest.mark.parametrize("case", CASES)
def test_trees_are_those_of_the_plain_rule(case: tuple[int, ...], nodes: int):
    block = random_block(*case)
    tokens, parents = trees_of(block, nodes)
    expected = draft_tree(in_float(block), nodes)
    assert (tokens.tolist(), parents.tolist()) == (expected[0].tolist(), expected[1].tolist())


def broken_block() -> BlockLogits:
    block = random_block(3, 4, 300, 6, 500)
    block.rows[1] = torch.nan
    block.rows[2, 1:] = -torch.inf
    return block


def test_rows_that_are_no_numbers_give_tokens_all_the_same():
    """Numbers that are none, and those below all others, count alike: the first column is taken."""
    block = broken_block()
    tokens = chains_of(block)
    assert block.tokens is not None
    first = int(block.tokens[0])
    assert tokens[1].tolist() == [first] * 4
    assert tokens[2, 1:].tolist() == [first] * 3
    assert tokens[0].tolist() == draft_chain(in_float(block))[0][0].tolist()


def test_trees_of_rows_that_are_no_numbers_are_trees():
    """No siblings are alike, and no parent is behind its child."""
    block = broken_block()
    tokens, parents = trees_of(block, 12)
    assert block.tokens is not None
    assert set(tokens.flatten().tolist()) <= set(block.tokens.tolist())
    for own, above in zip(tokens.tolist(), parents.tolist(), strict=True):
        assert all(-1 <= parent < node for node, parent in enumerate(above))
        assert len(set(zip(above, own, strict=True))) == len(own)
