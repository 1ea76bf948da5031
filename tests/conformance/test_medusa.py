"""Medusa: drafts are what the heads say over the target's last hidden state; Transformers computes that state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conformance_models import make_model, native_testbed
from plain_decoding import request, run
from tiny_block import tiny_block
from tiny_medusa import HEADS, medusa_tensors, tiny_medusa

from outrider.core.draft import Draft
from outrider.core.errors import ConfigError
from outrider.drafters.base import DrafterContext
from outrider.drafters.medusa import MedusaConfig
from outrider.drafters.registry import parse_drafter


def watch(engine: Any) -> list[tuple[list[int], Draft]]:
    """The texts and drafts of an engine's rounds, as they are drafted."""
    seen: list[tuple[list[int], Draft]] = []
    propose = engine.drafter.propose

    def watched(view: Any) -> Any:
        drafts = propose(view)
        seen.extend((list(seq.tokens), draft) for seq, draft in zip(view.seqs, drafts, strict=True) if len(draft))
        return drafts

    engine.drafter.propose = watched
    return seen


@torch.inference_mode()
def head_logits(model: Any, tokens: list[int]) -> list[torch.Tensor]:
    """By the heads' own formula, over the hidden state at the last token but one."""
    hidden = model.model(input_ids=torch.tensor([tokens[:-1]])).last_hidden_state[0, -1]  # after the final norm
    weights = medusa_tensors(hidden.shape[0], model.config.vocab_size)
    out = []
    for i in range(HEADS):
        x = hidden + F.silu(weights[f"{i}.0.linear.weight"] @ hidden + weights[f"{i}.0.linear.bias"])
        out.append(weights[f"{i}.1.weight"] @ x)
    return out


def test_chains_are_the_best_token_of_each_head():
    bed = native_testbed("llama")
    folder = tiny_medusa(bed.target(64).model.decoder)
    tried = bed.engine(f"medusa:model={folder},tree=0")
    seen = watch(tried)
    prompts = [range(1, 14), [i % 20 + 1 for i in range(33)]]  # of one page and of several
    run(tried, [request(p, max_tokens=12, ignore_eos=True, temperature=0.0) for p in prompts])
    assert len(seen) >= 8
    model = make_model("llama")
    for tokens, draft in seen:
        assert list(draft.tokens) == [int(logits.argmax()) for logits in head_logits(model, tokens)][: len(draft)]


def test_trees_are_the_likeliest_paths():
    bed = native_testbed("llama")
    folder = tiny_medusa(bed.target(64).model.decoder)
    tried = bed.engine(f"medusa:model={folder},tree=9")
    seen = watch(tried)
    run(tried, [request(range(1, 14), max_tokens=12, ignore_eos=True, temperature=0.0)])
    model = make_model("llama")
    for tokens, draft in seen:
        scores = [logits.double().log_softmax(-1) for logits in head_logits(model, tokens)]
        totals: dict[tuple[int, ...], float] = {}
        level: dict[tuple[int, ...], float] = {(): 0.0}
        for row in scores:
            level = {(*path, t): s + float(row[t]) for path, s in level.items() for t in range(len(row))}
            totals |= level
            level = dict(sorted(level.items(), key=lambda item: -item[1])[:8])
        best = sorted(totals, key=lambda path: -totals[path])[: len(draft)]
        paths = {tuple(int(draft.tokens[n]) for n in draft.path(node)) for node in range(len(draft))}
        assert paths == set(best)


def test_bad_options_and_other_heads_are_refused():
    target = native_testbed("llama").target(64)
    folder = tiny_medusa(target.model.decoder)
    with pytest.raises(ConfigError, match="medusa needs heads"):
        parse_drafter("medusa")
    with pytest.raises(ConfigError, match="tree must be 0 to 31"):
        MedusaConfig(model=str(folder), tree=99)
    context = DrafterContext(vocab_size=24, context=160, target=target)
    with pytest.raises(ConfigError, match="block:model="):
        MedusaConfig(model=str(tiny_block(target.model.decoder))).build(context)
