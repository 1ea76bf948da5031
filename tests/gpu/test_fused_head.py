"""Heads that draft token by token, by the fused kernels against the plain modules: texts, steps, trees, logits."""

from __future__ import annotations

import os
import sys
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.kernels.triton_heads import fetch_texts, join_rows
from outrider.kvcache.pages import PagePool
from outrider.models.decoder import Decoder
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.mtp import MtpHead
from outrider.models.load import load_decoder
from outrider.runners.draft_batch import DraftBatch, HeadDraft
from outrider.runners.fused_head import FusedHead
from outrider.runners.heads import HeadBatch, HeadRunner
from outrider.runners.paged_model import PagedModel
from outrider.testing.synthetic import synthetic_pair

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
from tiny_eagle import eagle_config, random_eagle

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("few_programs")]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE, DTYPE = ("cpu", torch.float32) if INTERPRETED else ("cuda", torch.bfloat16)
CLOSE = 2e-4 if INTERPRETED else 0.06  # of numbers of about 1
KINDS: dict[str, dict[str, Any]] = {
    "eagle1": {"kind": "eagle", "bias": True},
    "eagle3": {"draft_vocab_size": 300, "own_head": True},
    "eagle3.1": {"norm_output": True, "norm_before_residual": True, "draft_vocab_size": 300, "layers": 2},
    "biased": {"qkv_bias": True, "window": 12},
    "mtp": {"kind": "mtp", "qk_norm": True, "hidden_first": True},
}
LENGTHS, FIRSTS, LAST = [2, 8], [0, 1], [5, 300]
"""Tokens of each text, where its reading begins, and its last token."""


@pytest.fixture(params=KINDS)
def heads(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Any]:
    """A head, and one of the same weights in float32."""
    pair = synthetic_pair("tiny", dtype=DTYPE, device=DEVICE, seed=3)
    wide = load_decoder(pair.save(tmp_path)[0], device=DEVICE, dtype=torch.float32)
    head = _head(request.param, pair.target)
    exact = _head(request.param, wide).float()
    exact.load_state_dict(head.state_dict())
    return head, exact


def _head(kind: str, decoder: Decoder) -> Any:
    config = eagle_config(decoder.config, intermediate_size=96, **KINDS[kind])
    if config.kind != "mtp":
        return random_eagle(config, decoder).to(DEVICE, DTYPE)
    made = MtpHead(HeadConfig(**_fields(config) | {"taps": (len(decoder.config.layers) - 1,)}), decoder)
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.dim() == 1 else 0.1))
    return made.requires_grad_(False).to(DEVICE, DTYPE)


def _fields(config: HeadConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in HeadConfig.__dataclass_fields__}


def outputs(head: Any, *, fused: bool, given: list[Tensor] | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """Hidden states and logits of texts that are read, of a second token, and of two children of that.

    given: the hidden states that steps begin with, in place of those of the step before: what rounding does to one step
    is compared, and not what becomes of it in the next.
    """
    model = PagedModel(head.decoder, PagePool(40), 256)
    model.fused = True
    model.keep_taps(head.config.taps)
    assert model.kept is not None
    g = torch.Generator().manual_seed(7)
    model.kept.features.copy_(torch.randn(model.kept.features.shape, generator=g).to(DTYPE))
    model.kept.tokens.copy_(torch.randint(0, 300, model.kept.tokens.shape, generator=g))
    for i, length in enumerate(LENGTHS):
        model.pool.open(i, ())
        model.pool.reserve(i, length + 8)

    def nothing(batch: HeadBatch, _: int) -> HeadDraft:
        return HeadDraft(batch.last[:, None])

    make = partial(FusedHead, head, pdl=not INTERPRETED) if fused else None
    runner = HeadRunner(model, head, nothing, max_accepted=max(LENGTHS) - 1, fused=make)
    batch = HeadBatch(runner, len(LENGTHS))
    batch.fill(model.tables.table_ids(range(len(LENGTHS))), LENGTHS, LAST, FIRSTS)
    hidden = [batch.read()]
    ids = torch.tensor([[9], [8]], device=DEVICE)
    before = hidden if given is None else [each.to(DTYPE) for each in given]
    hidden.append(batch.forward(ids, before[0].to(hidden[0].dtype), batch.lengths))
    ancestors = torch.tensor([[0b0111, 0b1011]], device=DEVICE).expand(2, -1)
    depths, children = torch.full_like(ancestors, 2), torch.tensor([[1, 2], [3, 4]], device=DEVICE)
    hidden.append(batch.grow(children, before[1].to(hidden[0].dtype).expand(-1, 2, -1), ancestors, depths, 2))
    return hidden, [runner.logits(each.flatten(0, 1)) for each in hidden]


@torch.inference_mode()
def test_fused_steps_are_the_plain_ones(heads: tuple[Any, Any]):
    judged = outputs(heads[0], fused=False)
    tried = outputs(heads[0], fused=True, given=judged[0])
    for ours, theirs in zip((*tried[0], *tried[1]), (*judged[0], *judged[1]), strict=True):
        assert ours.shape == theirs.shape
        assert float((ours - theirs).abs().max()) < CLOSE * float(theirs.abs().max())


@torch.inference_mode()
def test_fused_steps_are_as_near_to_float32_as_the_plain_ones(heads: tuple[Any, Any]):
    head, exact = heads
    first = outputs(exact, fused=False)
    rounded = outputs(exact, fused=False, given=first[0])  # steps begin with the same numbers
    found = *(outputs(head, fused=fused, given=first[0]) for fused in (True, False)), rounded
    for ours, theirs, judge in zip(*(chain(*each) for each in found), strict=True):
        assert ours.shape == theirs.shape == judge.shape
        error, allowed = ((each.float() - judge).square().mean().sqrt() for each in (ours, theirs))
        size = judge.square().mean().sqrt()
        assert float(error) < 1.5 * float(allowed) + 1e-5 * float(size)


@pytest.mark.parametrize("hidden_first", [False, True])
def test_rows_are_joined(hidden_first: bool):
    """With norms, whose hidden half is kept besides, and without."""
    g = torch.Generator().manual_seed(1)
    embedding, hidden, norms = (torch.randn(shape, generator=g).to(DEVICE) for shape in ((50, 48), (3, 48), (2, 48)))
    ids, kept = torch.tensor([7, 0, 49], device=DEVICE), torch.empty(3, 48, device=DEVICE)
    for weights in (norms, None):
        out = torch.empty(3, 96, device=DEVICE)
        residual = None if weights is None else kept
        join_rows(
            embedding, ids, hidden, weights, out, residual, eps=1e-5, hidden_first=hidden_first, pdl=not INTERPRETED
        )
        parts = [embedding[ids], hidden]
        if weights is not None:
            parts = [torch.nn.functional.rms_norm(x, (48,), w, 1e-5) for x, w in zip(parts, weights, strict=True)]
            torch.testing.assert_close(kept, parts[1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out, torch.cat(parts[::-1] if hidden_first else parts, -1), rtol=1e-5, atol=1e-5)


def test_texts_are_fetched_from_a_state():
    """Two of four, in their order; none where there is no state."""
    lengths, last = torch.tensor([5, 6], device=DEVICE), torch.tensor([[1, 2], [3, 4]], device=DEVICE)
    state = torch.tensor([lengths.data_ptr(), last.data_ptr()], device=DEVICE)
    rows, none = torch.tensor([1, -1, 0, -1], device=DEVICE), torch.full((4,), -1, device=DEVICE)
    into = [torch.full((4,), 9, device=DEVICE) for _ in range(3)]
    fetch_texts(state * 0, none, *into)
    assert [each.tolist() for each in into] == [[9] * 4, [9] * 4, [8] * 4]
    fetch_texts(state, rows, *into)
    assert [each.tolist() for each in into] == [[6, 9, 5, 9], [4, 9, 2, 9], [5, 8, 4, 8]]


@pytest.mark.parametrize("before", [True, False])
def test_what_is_not_read_is_gathered(before: bool):
    """From the beginning of a text, from its middle, more than there is room for, and nothing but the last token."""
    decoder = synthetic_pair("tiny", dtype=DTYPE, device=DEVICE, seed=3).target
    model = PagedModel(decoder, PagePool(40), 256)
    model.keep_taps((0, 1))
    assert model.kept is not None
    g = torch.Generator().manual_seed(7)
    model.kept.features.copy_(torch.randn(model.kept.features.shape, generator=g).to(DTYPE))
    model.kept.tokens.copy_(torch.randint(0, 300, model.kept.tokens.shape, generator=g))
    lengths, firsts = [2, 8, 40, 17], [0, 3, 1, 16]
    for i, length in enumerate(lengths):
        model.pool.open(i, ())
        model.pool.reserve(i, length)
    batch = DraftBatch(model, 4, None, sampled=False)
    batch.fill(model.tables.table_ids(range(4)), lengths, [5, 6, 7, 8], firsts)
    expected = batch.unread(6, before=before)
    model.fused = True
    made = batch.unread(6, before=before)
    assert made.firsts.tolist() == expected.firsts.tolist() == [0, 3, 34 - (not before), 16]
    assert made.counts.tolist() == expected.counts.tolist() == ([2, 5, 6, 1] if before else [1, 4, 6, 0])
    assert not before or made.ends.tolist() == expected.ends.tolist() == [1, 10, 17, 18]
    ours, theirs = made.features.view(4, 6, -1), expected.features.view(4, 6, -1)
    for i, count in enumerate(made.counts.tolist()):
        assert made.ids[i, :count].tolist() == expected.ids[i, :count].tolist()
        assert torch.equal(ours[i, :count], theirs[i, :count])
    assert not before or not bool(ours[0, 0].any())


def test_gathered_rows_are_located():
    """As `locate_rows` does: rows that are not real go to the scratch slot."""
    from outrider.kernels.batch import RowPlaces
    from outrider.kernels.triton_rope import locate_rows
    from outrider.runners.draft_batch import HeadShape

    decoder = synthetic_pair("tiny", dtype=DTYPE, device=DEVICE, seed=3).target
    model = PagedModel(decoder, PagePool(40), 256)
    model.keep_taps((0, 1))
    lengths, firsts = [2, 8, 40, 17], [0, 3, 1, 16]
    for i, length in enumerate(lengths):
        model.pool.open(i, ())
        model.pool.reserve(i, length)
    model.fused = True
    batch = DraftBatch(model, 4, None, sampled=False)
    batch.fill(model.tables.table_ids(range(4)), lengths, [5, 6, 7, 8], firsts)
    cos_sin = torch.randn(300, 8, 2, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    rows, places = batch.unread_located(6, cos_sin)
    expected, shape = RowPlaces.empty(24, 16, model.device), HeadShape(4, 2, 16, 0.25)
    seen = batch.attention_batch(shape, 6, rows.firsts, rows.counts)
    locate_rows(seen, cos_sin, expected, scratch_slot=model.scratch_slot, page=model.pool.size, pdl=False)
    assert places.slots.tolist() == expected.slots.tolist()
    assert places.slots.tolist().count(model.scratch_slot) == 24 - sum(rows.counts.tolist())
    assert torch.equal(places.cos_sin, expected.cos_sin)
