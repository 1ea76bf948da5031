"""Memory on CUDA is shared out from what was measured; too little is an error at start, with the numbers."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from outrider.core.draft import Draft
from outrider.core.errors import ConfigError
from outrider.core.sequence import Span
from outrider.loading.memory import SPARE_BYTES, ReservedMemory, Workload, measure_workspace, plan_memory
from outrider.runners.native import NativeRunner
from outrider.testing.synthetic import synthetic_pair

pytestmark = pytest.mark.gpu
SMALL = Workload(context=512, max_round_tokens=256, max_batch=2, max_width=2)
VOCAB = 128_256
ROW_BYTES = VOCAB * 4
"""Bytes of one row's logits."""


@pytest.fixture(scope="module")
def decoder():
    return synthetic_pair("tiny", device=torch.device("cuda"), dtype=torch.bfloat16).target


@pytest.fixture(scope="module")
def many_words():
    """A small model of a large vocabulary."""
    shape = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    return synthetic_pair(
        {"model_type": "llama", "vocab_size": VOCAB, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
        | shape
        | {"intermediate_size": 512, "num_hidden_layers": 3, "rope_theta": 10_000.0},
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
    ).target


def free() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def test_what_is_wanted_is_planned_where_it_fits(decoder):
    plan = plan_memory(decoder, SMALL, max_tokens=4096, exact_tokens=None, reserved=ReservedMemory())
    assert plan.tokens == 4096
    assert plan.workspace >= measure_workspace(decoder, replace(SMALL, max_round_tokens=64)) // 2
    assert str(plan.tokens) in str(plan)


def test_a_draft_model_beside_takes_its_share(decoder):
    left = torch.cuda.mem_get_info()[0]
    alone, shared = (
        plan_memory(decoder, SMALL, max_tokens=1 << 40, exact_tokens=None, reserved=reserved)
        for reserved in (ReservedMemory(), ReservedMemory(weights=left // 4, bytes_per_token=0))
    )
    assert shared.tokens < 0.8 * alone.tokens


def test_more_than_there_is_room_for_is_refused_with_the_numbers(decoder):
    with pytest.raises(ConfigError, match=r"no room for a cache of \d+ tokens, but for \d+\. Of .* GiB"):
        plan_memory(decoder, SMALL, max_tokens=64, exact_tokens=1 << 40, reserved=ReservedMemory())
    left = torch.cuda.mem_get_info()[0]
    with pytest.raises(ConfigError, match="no room"):
        plan_memory(decoder, SMALL, max_tokens=4096, exact_tokens=None, reserved=ReservedMemory(weights=left))


def test_wide_passes_are_counted(many_words):
    """128 texts of 6 rows against 8: the room of passes, and the logits of two rounds, each 4 bytes a row and token."""
    few, many = (measure_workspace(many_words, Workload(context=2048, max_batch=n, max_width=6)) for n in (8, 128))
    rows = (768 - 256) + 2 * (768 - 48)
    assert 0.9 * rows * ROW_BYTES < many - few < 1.3 * rows * ROW_BYTES + (256 << 20)


@pytest.mark.parametrize(("batch", "width"), [(8, 6), (128, 6), (256, 6)])
def test_what_is_planned_is_enough_for_what_is_served(many_words, batch, width):
    """All captured, a prompt read and two rounds' logits held take no more than the plan says, but for the spare.

    256 texts of 6 rows are scored in two passes: their parts are held beside the whole.
    """
    work = Workload(context=2048, max_batch=batch, max_width=width)
    plan = plan_memory(many_words, work, max_tokens=32768, exact_tokens=None, reserved=ReservedMemory())
    before = free()
    target = NativeRunner(many_words, plan.tokens, context=2048)
    list(target.capture(batch, width))
    target.pool.open(-1, range(2000), "")
    target.pool.reserve(-1, 2001)
    target.score([Span(-1, 0, tuple(range(2000)))])
    target.release(-1)
    spans = [Span(i, 0, (i,), Draft(tuple(range(1, width)))) for i in range(batch)]
    for span in spans:
        target.pool.open(span.seq_id, span.tokens, str(span.seq_id))
        assert target.pool.reserve(span.seq_id, span.width)
    held = [target.score(spans).logits for _ in range(2)]
    torch.cuda.synchronize()
    took = before - torch.cuda.mem_get_info()[0]
    assert held[0].shape == held[1].shape == (batch * width, VOCAB)
    assert took <= plan.workspace + plan.cache + SPARE_BYTES // 4
    del target, held
    free()


def test_a_device_too_small_for_the_passes_is_an_error_with_the_numbers(many_words):
    blocker = torch.empty(free() - (600 << 20), dtype=torch.uint8, device="cuda")
    work = Workload(context=2048, max_batch=128, max_width=6)
    try:
        with pytest.raises(ConfigError, match=r"no room for rounds of 768 rows: of .* GiB 0\.\d+ are left, .* 0\.37"):
            plan_memory(many_words, work, max_tokens=4096, exact_tokens=None, reserved=ReservedMemory())
    finally:
        del blocker
        free()
