"""Whole drafts by the CPU kernels: those of the heads' own code, which runs beside a target that is not packed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.checkpoints.resolve import resolve
from outrider.core.errors import OutriderError
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence, Span
from outrider.drafters.base import DrafterContext
from outrider.drafters.block import Block, BlockConfig
from outrider.drafters.eagle import Eagle, EagleConfig
from outrider.models import blocks
from outrider.models.heads import packed
from outrider.models.load import load_decoder
from outrider.native.library import Library
from outrider.native.tensors import BlockTensor, Kind
from outrider.runners.cpu_heads import CpuBlocks, TreeSize
from outrider.runners.draft_batch import HeadDraft
from outrider.runners.native import NativeRunner
from outrider.runners.threads import use_threads

sys.path += [str(Path(__file__).parents[1] / "checkpoints"), str(Path(__file__).parents[2] / "conformance")]
from tiny_block import block_config, random_block, save_block
from tiny_eagle import eagle_config, random_eagle, save_eagle
from tiny_gguf import random_model, write_gguf

TEXT = [int(t) for t in np.random.default_rng(3).integers(0, 250, 100)]
BLOCKS: dict[str, dict[str, Any]] = {
    "dspark": {"draft_vocab_size": 230, "confidence": True, "confidence_with_markov": True, "qk_norm": True},
    "dflash": {"markov_rank": 0, "sample_from_anchor": False, "own_mask": False, "mask_token_id": 3, "block_size": 6},
    "causal": {"causal": True, "block_size": 4, "window": 20, "qkv_bias": True, "confidence": True},
    "own tables": {"own_embedding": True, "own_head": True, "bias": True},
}
EAGLES: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab_size": 230},
    "3.1": {"norm_output": True, "fc_norm": True, "norm_before_residual": True, "layers": 2},
    "norm before fc": {"norm_before_fc": True, "own_embedding": True, "own_head": True, "qk_norm": True},
}
ROUNDS = (30, 1, 4, 1, 17, 2)
"""Tokens that each round adds to a text: a prompt, then as much as a draft can, or more."""


@pytest.fixture(autouse=True)
def own_home(native: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `native`: the kernels are not built anew."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    file = tmp_path / "m.gguf"
    write_gguf(file, random_model("llama", num_hidden_layers=4), kind=gguf.GGMLQuantizationType.Q4_1)
    return resolve(str(file))


@pytest.fixture
def floats(native: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block is packed as the floats it stands for, so that rows are not rounded to 8 bits."""

    def pack(values: Any, columns: int, order: Tensor | None = None) -> BlockTensor:
        return BlockTensor.pack(native, Kind.F32, np.ascontiguousarray(values).view(np.uint8), columns, order)

    def of_file(self: Any, stored: Any, columns: int, order: Tensor | None) -> BlockTensor:
        return pack(stored.dequantize(0, len(stored.data)), columns, order)

    def of_head(_: Library, weight: Tensor, bias: Tensor | None = None) -> blocks.BlockLinear:
        return blocks.BlockLinear((pack(weight.float().numpy(), weight.shape[1]),), bias)

    monkeypatch.setattr(blocks.BlockPacker, "_in_blocks", of_file)
    monkeypatch.setattr(packed, "int8_linear", of_head)


def runner_of(folder: Path, *, kernels: bool) -> NativeRunner:
    runner = NativeRunner(load_decoder(folder, device="cpu", quantize="int4" if kernels else None), 1024, context=256)
    assert (runner.cpu_pass is not None) == kernels
    return runner


def drafter_of(kind: str, folder: Path, target: NativeRunner, *, mode: Any = "seeded", tree: int = 0) -> Block | Eagle:
    """A drafter with the head of this kind, made once in this folder."""
    decoder = target.model.decoder
    if kind in BLOCKS and not folder.exists():
        save_block(folder, random_block(block_config(decoder.config, **BLOCKS[kind]), decoder))
    elif not folder.exists():
        save_eagle(folder, random_eagle(eagle_config(decoder.config, **EAGLES[kind]), decoder))
    config = BlockConfig(model=str(folder), tree=tree) if kind in BLOCKS else EagleConfig(model=str(folder), k=4)
    return config.build(DrafterContext(vocab_size=target.vocab_size, context=256, mode=mode, target=target))


def rounds(target: NativeRunner, drafter: Block | Eagle, temperature: float = 0.0) -> Iterator[HeadDraft]:
    """Drafts for two texts that grow by ROUNDS, one of them from the second round on."""
    params = SamplingParams(temperature=temperature)
    seqs = [Sequence(i, [], 0, params, seed=7 + i) for i in range(2)]
    for round_, more in enumerate(ROUNDS):
        for seq in seqs[: 1 + (round_ > 0)]:
            text, seq.round = TEXT[5 * seq.id :], round_
            first = not seq.tokens
            seq.tokens += text[len(seq.tokens) : len(seq.tokens) + more + (3 if first else 0)]
            if first:
                target.pool.open(seq.id, ())
            target.pool.reserve(seq.id, len(seq.tokens))
            target.score([Span(seq.id, seq.cached, tuple(seq.tokens[seq.cached : -1]))])
            seq.cached = len(seq.tokens) - 1
        asked = [seq for seq in seqs if seq.tokens]
        assert drafter.runner.ready(asked, None) == list(range(len(asked)))
        yield drafter.runner.draft(asked, None, 4)


def check_alike(kind: str, folders: tuple[Path, Path], mode: Any = "seeded", tree: int = 0, warm: float = 0.0) -> None:
    """The kernels' drafts are those of the head's own code."""
    runners = [runner_of(folders[0], kernels=kernels) for kernels in (True, False)]
    drafters = [drafter_of(kind, folders[1], runner, mode=mode, tree=tree) for runner in runners]
    assert drafters[0].runner.cpu is not None
    assert drafters[0].runner.chains == (mode == "seeded" and not tree)
    assert drafters[1].runner.cpu is None
    for own, exact in zip(*map(rounds, runners, drafters, (warm, warm)), strict=True):
        count = own.tokens.shape[1]
        assert torch.equal(own.tokens, exact.tokens[:, :count])
        for part, other in ((own.parents, exact.parents), (own.probs, exact.probs), (own.confidence, exact.confidence)):
            assert (part is None) == (other is None)
            if part is not None and other is not None:
                assert torch.allclose(part, other[:, :count], atol=2e-4)
    for group, other in zip(*(runner.model.groups for runner in runners), strict=True):
        for mine, theirs in zip(group, other, strict=True):  # a head's keys and values too
            assert torch.allclose(mine[:, :64].float(), theirs[:, :64].float(), atol=2e-3)


@pytest.mark.usefixtures("floats")
@pytest.mark.parametrize("warm", [0.0, 0.9])
@pytest.mark.parametrize("kind", [*BLOCKS, *EAGLES])
def test_drafts_are_those_of_the_heads_own_code(kernels: Library, kind: str, warm: float, target: Path, tmp_path: Path):
    """Where nothing is rounded to 8 bits the two differ by the order of sums alone."""
    check_alike(kind, (target, tmp_path / "head"), warm=warm)


@pytest.mark.usefixtures("floats", "native")
def test_drawn_chains_are_made_of_the_kernels_logits(target: Path, tmp_path: Path):
    check_alike("dspark", (target, tmp_path / "head"), "distribution", 0, 0.9)


@pytest.mark.usefixtures("floats")
@pytest.mark.parametrize("warm", [0.0, 0.9])
@pytest.mark.parametrize(("kind", "tree"), [("dspark", 9), ("dflash", 31), ("causal", 3)])
def test_trees_are_those_of_the_heads_own_code(
    kernels: Library, kind: str, tree: int, warm: float, target: Path, tmp_path: Path
):
    check_alike(kind, (target, tmp_path / "head"), tree=tree, warm=warm)


@pytest.mark.usefixtures("floats", "native")
def test_trees_over_more_columns_than_are_ranked_at_once(tmp_path: Path):
    file = tmp_path / "wide.gguf"
    write_gguf(file, random_model("llama", num_hidden_layers=4, vocab_size=5000), kind=gguf.GGMLQuantizationType.Q4_1)
    for warm in (0.0, 0.9):
        check_alike("own tables", (resolve(str(file)), tmp_path / "head"), tree=24, warm=warm)


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_drafts_do_not_depend_on_company_threads_or_length(kernels: Library, kind: str, target: Path, tmp_path: Path):
    runner = runner_of(target, kernels=True)
    drafter = drafter_of(kind, tmp_path / "head", runner)
    both = next(made for i, made in enumerate(rounds(runner, drafter, 0.7)) if i == 4)
    alone = runner_of(target, kernels=True)
    single = drafter_of(kind, tmp_path / "head", alone)
    tokens = TEXT[5 : 5 + sum(ROUNDS[1:5]) + 3]
    seq = Sequence(0, tokens, 0, SamplingParams(temperature=0.7), seed=8, cached=len(tokens) - 1)
    alone.pool.open(0, ())
    alone.pool.reserve(0, len(tokens))
    alone.score([Span(0, 0, tuple(tokens[:-1]))])
    assert single.runner.ready([seq], None) == [0]
    for length, threads in ((4, 1), (4, 2), (2, 2), (1, 1)):
        with use_threads(threads):
            assert torch.equal(single.runner.draft([seq], None, length).tokens, both.tokens[1:, :length])


def test_what_is_out_of_bounds_is_refused(native: Library, target: Path, tmp_path: Path):
    runner = runner_of(target, kernels=True)
    drafter = drafter_of("dspark", tmp_path / "head", runner)
    next(rounds(runner, drafter))
    cpu, batch = drafter.runner.cpu, drafter.runner._batch(1)
    assert isinstance(cpu, CpuBlocks)
    texts = cpu.texts_of(batch)
    with torch.inference_mode():
        batch.last[0] = 10_000
        with pytest.raises(OutriderError, match="a text is out of bounds"):
            cpu.chains(texts, 64, 2)
        batch.last[0] = 1
        with pytest.raises(OutriderError, match="a block has fewer rows than tokens"):
            cpu.chains(texts, 64, 6)
        with pytest.raises(OutriderError, match="a tree's size is out of bounds"):
            cpu.trees(texts, 64, 2, TreeSize(5, width=9))
        runner.model.tables.pages[batch.table_ids[0], 0] = 1 << 20
        with pytest.raises(OutriderError, match="page is out of bounds"):
            cpu.chains(texts, 64, 2)
