"""Layer skip: drafts are what the kept layers say over the target's own keys and values; Transformers is the judge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance_models import make_model, native_testbed
from plain_decoding import request, run
from torch import nn
from transformers.cache_utils import DynamicCache

from outrider.core.draft import Draft
from outrider.core.errors import ConfigError
from outrider.drafters.base import DrafterContext
from outrider.drafters.layer_skip import LayerSkipConfig, default_skip, kept_layers, parse_layers, write_layers
from outrider.drafters.registry import parse_drafter
from outrider.testing.toy import ToyRunner

SKIP = (1, 2)  # of four layers


def greedy_by_kept_layers(model: Any, tokens: list[int], skip: tuple[int, ...], count: int) -> list[int]:
    """What the other layers say next, over the keys and values of the whole model for all tokens but the last."""
    cache = DynamicCache()
    model(input_ids=torch.tensor([tokens[:-1]]), past_key_values=cache, use_cache=True)
    kept = [i for i in range(len(model.model.layers)) if i not in skip]
    own = DynamicCache()
    for new, old in enumerate(kept):
        own.update(cache.layers[old].keys, cache.layers[old].values, new)
    model.model.layers = nn.ModuleList(model.model.layers[i] for i in kept)
    model.config.num_hidden_layers = len(kept)
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = i
    drafted: list[int] = []
    last = tokens[-1]
    for _ in range(count):
        logits = model(input_ids=torch.tensor([[last]]), past_key_values=own, use_cache=True).logits
        last = int(logits[0, -1].argmax())
        drafted.append(last)
    return drafted


@torch.inference_mode()
def test_drafts_are_those_of_the_kept_layers():
    bed = native_testbed("llama-deep")
    tried = bed.engine(f"layer-skip:skip={write_layers(SKIP)},k=4")
    seen: list[tuple[list[int], Draft]] = []
    drafter: Any = tried.drafter
    propose = drafter.propose

    def watched(view: Any) -> Any:
        drafts = propose(view)
        seen.extend((list(seq.tokens), draft) for seq, draft in zip(view.seqs, drafts, strict=True) if len(draft))
        return drafts

    drafter.propose = watched
    asked = request(range(1, 14), max_tokens=12, ignore_eos=True, temperature=0.0)
    run(tried, [asked])
    assert len(seen) >= 3
    for tokens, draft in seen:
        expected = greedy_by_kept_layers(make_model("llama-deep"), tokens, SKIP, len(draft))
        assert list(draft.tokens) == expected


def test_layers_are_written_as_they_are_read():
    assert parse_layers("8-11/14/20") == (8, 9, 10, 11, 14, 20)
    assert write_layers((8, 9, 10, 11, 14, 20)) == "8-11/14/20"
    assert parse_layers("") == ()
    assert default_skip(30) == (8, 10, 12, 14, 16, 18, 20, 22)
    assert kept_layers(4, (1, 2)) == [0, 3]


@pytest.mark.parametrize("bad", ["x", "3-1", "-2", "1/1", "4/3", "1-", "99999", "1.5", "²"])
def test_what_is_no_list_of_layers_is_refused(bad: str):
    with pytest.raises(ConfigError, match="layer-skip"):
        parse_drafter(f"layer-skip:skip={bad}")


def test_layers_that_do_not_exist_and_all_layers_are_refused():
    target = native_testbed("llama").target(64)
    context = DrafterContext(vocab_size=24, context=160, target=target)
    for skip, reason in (("0-1", "some, not all"), ("7", "layers are 0 to 1")):
        with pytest.raises(ConfigError, match=reason):
            LayerSkipConfig(skip=skip).build(context)


def test_a_target_that_is_not_native_is_refused():
    context = DrafterContext(vocab_size=24, context=160, target=ToyRunner())
    with pytest.raises(ConfigError, match="native family"):
        LayerSkipConfig().build(context)
