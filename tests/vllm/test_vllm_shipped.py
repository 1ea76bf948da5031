"""The shipped head in vLLM's own classes.

vLLM runs DSpark heads with its model runner V2 alone, which wants Triton, and its build for CPUs has none. Its
configuration, loader and model run on a CPU all the same, in a process that leaves that check out.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from client_vllm import ENVIRONMENT
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.advise.export import Choice, export_to, with_vllm_head
from outrider.checkpoints.resolve import resolve
from outrider.drafters.shipped import shipped_heads
from outrider.models.heads.block import BlockHead
from outrider.models.heads.checkpoint import check_target, load_weights, parse_head_config
from outrider.models.heads.files import open_head
from outrider.train.session import load_target

pytestmark = pytest.mark.vllm
CONTEXT, ANCHOR, DRAFTS = 9, 504, 7
CONFIGURE = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
given = json.loads(sys.argv[1])
args = EngineArgs(model=given["target"], speculative_config=given["config"], dtype="float32", enforce_eager=True,
                  max_model_len=512)
"""
REFUSED = f"{CONFIGURE}\nargs.create_engine_config()\n"
# Attention is written out, from the layers' own parts: vLLM's takes its keys from the cache, which only a runner fills.
DRAFT = f"""{CONFIGURE}
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.model_loader import get_model

VllmConfig._validate_v1_model_runner = lambda self: None
torch.accelerator.empty_cache = lambda: None  # the loader calls it where no CPU worker has been set up
config = args.create_engine_config()
with set_current_vllm_config(config), torch.no_grad():
    init_distributed_environment(1, 0, f"file://{{given['folder']}}/store", 0, "gloo")
    initialize_model_parallel(1)
    model = get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
    features = load_file(f"{{given['folder']}}/features.safetensors")["features"]
    kept = {{}}

    def attend(attention):
        def call(q, k, v):
            heads, kv_heads, size = attention.num_heads, attention.num_kv_heads, attention.head_size
            before = kept[attention]
            k, v = (torch.cat([old, new.view(-1, kv_heads, size)]) for old, new in zip(before, (k, v)))
            q, k, v = (each.transpose(0, 1) for each in (q.view(-1, heads, size), k, v))
            made = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            return made.transpose(0, 1).flatten(1)
        return call

    count = len(features)
    context = model.model.hidden_norm(model.combine_hidden_states(features))
    for layer in model.model.layers:
        own = layer.self_attn
        q, k, v = own.qkv_proj(context)[0].split([own.q_size, own.kv_size, own.kv_size], -1)
        k = own.k_norm(k.reshape(count, own.num_kv_heads, own.head_dim)).flatten(1)
        _, k = own.rotary_emb(torch.arange(count), q.contiguous(), k)
        kept[own.attn] = k.view(count, -1, own.head_dim), v.reshape(count, -1, own.head_dim)
        own.attn.forward = attend(own.attn)
    ids = torch.full((given["drafts"],), model.model.mask_token_id)
    ids[0] = given["anchor"]
    hidden = model(ids, count + torch.arange(given["drafts"]))
    base, rows, tokens = model.compute_draft_logits(hidden), [], []
    before = ids[:1]
    for row in base:
        rows.append(row + model.markov_bias(model.markov_embed(before))[0])
        before = model.map_draft_to_target(rows[-1].argmax(-1, keepdim=True))
        tokens.append(before)
    confidence = model.compute_confidence(hidden, model.markov_embed(torch.cat([ids[:1], *tokens[:-1]])))
made = {{"logits": torch.stack(rows), "tokens": torch.cat(tokens), "confidence": confidence}}
save_file(made, f"{{given['folder']}}/drafted.safetensors")
"""


def run(code: str, folder: Path, config: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    given = {
        "target": str(resolve("demo")),
        "config": config,
        "folder": str(folder),
        "anchor": ANCHOR,
        "drafts": DRAFTS,
    }
    env = os.environ | ENVIRONMENT | {"HF_HUB_OFFLINE": "1"}
    words = [str(Path(os.environ["OUTRIDER_TEST_VLLM"]).parent / "python"), "-c", code, json.dumps(given)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=3600, env=env)


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    head = next(shipped_heads())
    return export_to("vllm", with_vllm_head(Choice("demo", head.drafter, DRAFTS, shipped=str(head.folder)))).arguments


def test_what_refuses_it_on_a_cpu(config: dict[str, Any], tmp_path: Path):
    done = run(REFUSED, tmp_path, config)
    assert done.returncode
    assert "Model Runner V1 does not support: dspark speculative decoding" in done.stderr


def test_the_head_as_it_is_shipped_lacks_rows(config: dict[str, Any], tmp_path: Path):
    """Which is why an export names a copy that has them."""
    done = run(DRAFT, tmp_path, config | {"model": str(next(shipped_heads()).folder)})
    assert done.returncode
    assert "must include lm_head weights" in done.stderr


@torch.no_grad()
def drafted_here(features: Tensor) -> dict[str, Tensor]:
    decoder, files = load_target("demo", "cpu"), open_head(str(next(shipped_heads()).folder))
    head = BlockHead(check_target(parse_head_config(files), decoder.config, name="", kinds=("block",)), decoder)
    load_weights(head, files)
    head = head.float()
    kept = head.keys_values(head.context(features), torch.arange(CONTEXT))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (torch.cat([old, new]) for old, new in zip(kept[layer], (k, v), strict=True))
        q, k, v = (each.transpose(0, 1) for each in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(0, 1).flatten(1)

    hidden = head(torch.tensor([ANCHOR]), torch.tensor([CONTEXT]), attend)[0]  # [drafts, hidden]
    before, rows, tokens = torch.tensor([ANCHOR]), list[Tensor](), list[Tensor]()
    assert head.markov_head is not None
    assert head.tokens is not None
    for row in head.logits(hidden):
        rows.append(row + head.markov_head(before)[0])
        before = head.tokens[rows[-1].argmax(-1, keepdim=True)]
        tokens.append(before)
    confidence = head.confidence(hidden, torch.cat([torch.tensor([ANCHOR]), *tokens[:-1]])).sigmoid()
    return {"logits": torch.stack(rows), "tokens": torch.cat(tokens), "confidence": confidence}


def test_its_drafts_are_ours(config: dict[str, Any], tmp_path: Path):
    features = torch.randn(CONTEXT, 5 * 576, generator=torch.Generator().manual_seed(1))
    save_file({"features": features}, tmp_path / "features.safetensors")
    done = run(DRAFT, tmp_path, config)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs, ours = load_file(tmp_path / "drafted.safetensors"), drafted_here(features)
    assert theirs["tokens"].tolist() == ours["tokens"].tolist()
    torch.testing.assert_close(theirs["logits"].float(), ours["logits"], atol=2e-3, rtol=1e-4)
    torch.testing.assert_close(theirs["confidence"].float(), ours["confidence"], atol=1e-3, rtol=1e-3)
    print(f"largest difference of logits: {(theirs['logits'] - ours['logits']).abs().max():.1e}")
