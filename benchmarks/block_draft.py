"""What a block drafter costs in a round: its pass, its reading of what was accepted, and the target's pass beside them.

    python benchmarks/block_draft.py [--shape llama-8b] [--batches 1 8 32] [--vocab 32768] [--trees 0 24]

Random weights of a real shape: times are real, and next to nothing is accepted. On CUDA each captured graph of a round
is timed alone, behind texts of `--prompt` tokens; a round is timed by the host's clock, rounds overlapping as they do.
`--shape tiny --device cpu` runs anywhere.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from gpu_frame import median_ms, replays, replays_within, sync

from outrider.core.sampling import SamplingParams
from outrider.drafters.base import DrafterContext
from outrider.drafters.block import Block, BlockConfig
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits, Request
from outrider.models.decoder import Decoder
from outrider.models.heads.block import BlockHead
from outrider.models.heads.config import HeadConfig
from outrider.runners.native import NativeRunner
from outrider.testing.synthetic import synthetic_pair
from outrider.testing.toy import ByteTokenizer
from outrider.verify.base import make_verifier

ROUNDS = 40
"""Timed, after as many that are not."""


def random_head(decoder: Decoder, args: argparse.Namespace) -> BlockHead:
    """As wide as the target, `--layers` layers, reading `--taps` of the target's."""
    config, count = decoder.config, len(decoder.config.layers)
    taps = tuple(sorted({1 + i * (count - 3) // max(1, args.taps - 1) for i in range(args.taps)}))
    made = HeadConfig(
        kind="block",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        draft_vocab_size=0 if args.vocab >= config.vocab_size else args.vocab,
        taps=taps,
        layers=args.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        rope=config.ropes[0],
        max_positions=config.max_positions,
        qk_norm=args.qk_norm,
        block_size=args.block,
        own_mask=True,
        markov_rank=args.rank,
        confidence=True,
        confidence_with_markov=args.rank > 0,
        sample_from_anchor=True,
    )
    with torch.device(decoder.device):
        return BlockHead(made, decoder).to(decoder.dtype).requires_grad_(False)


def prepare(decoder: Decoder, args: argparse.Namespace, batch: int, tree: int) -> Engine:
    """An engine that drafts with a random head, everything captured."""
    room = args.prompt + 2 * ROUNDS * (args.block + 2) + 64
    target = NativeRunner(decoder, batch * room, context=room)
    context = DrafterContext(
        vocab_size=target.vocab_size, context=room, device=target.device, target=target, max_batch=batch
    )
    drafter = Block(BlockConfig(model="random", tree=tree), random_head(decoder, args), target, context)
    for _ in (*drafter.runner.capture(batch), *target.capture(batch, 1 + drafter.traits.max_tokens)):
        pass
    limits = EngineLimits(max_batch=batch, max_round_tokens=max(2048, 64 * batch))
    return Engine(target, drafter, make_verifier("seeded"), ByteTokenizer(), limits=limits)


def measure(decoder: Decoder, args: argparse.Namespace, batch: int, tree: int) -> dict[str, Any]:
    engine, rng = prepare(decoder, args, batch, tree), random.Random(0)
    drafter, target, device = engine.drafter, engine.target, decoder.device
    if not isinstance(drafter, Block):
        raise TypeError("the engine has another drafter")
    params = SamplingParams(max_tokens=2 * ROUNDS * (args.block + 1), temperature=args.temperature, ignore_eos=True)
    for _ in range(batch):
        prompt = tuple(rng.randrange(256) for _ in range(args.prompt))
        engine.submit(Request(prompt=prompt, params=params))
    for _ in range(ROUNDS):
        engine.step()
    sync(device)
    began = time.perf_counter()
    for _ in range(ROUNDS):
        engine.step()
    sync(device)
    found: dict[str, Any] = {
        "batch": batch, "tree": tree, "drafted": drafter.traits.max_tokens,
        "round_ms": 1000 * (time.perf_counter() - began) / ROUNDS,
    }  # fmt: skip
    with replays() as seen, replays_within(drafter.runner, "draft", seen) as drafted:
        engine.step()
    passes = [graph for graph in seen if all(graph is not each for each in drafted)]
    for name, graphs in (("draft_ms", drafted), ("verify_ms", passes)):  # a draft's time is with what it reads before
        found[name] = sum(median_ms(graph.replay, device) for graph in graphs) if graphs else None
    if not seen:  # nothing is captured: by the host's clock, of one more round
        seqs = [each.seq for each in engine._live.values()]
        found["draft_ms"] = median_ms(lambda: drafter.runner.draft(seqs, None), device, 5)
    if found["verify_ms"]:
        found["ratio"] = found["draft_ms"] / found["verify_ms"]
    found["plain_ms"] = plain_ms(target, batch, args.prompt)
    for seq_id in list(engine._live):
        engine.cancel(seq_id)
    return found


def plain_ms(target: Any, batch: int, prompt: int) -> float | None:
    """A pass of one row a sequence, as plain decoding takes; None where nothing is captured."""
    if target.graphs is None:
        return None
    shapes = [shape for shape in target.graphs.captured if shape.width == 1 and shape.batch >= batch]
    forward, graph = target.graphs.captured[min(shapes, key=lambda shape: shape.batch)]
    forward.batch.starts.fill_(prompt)
    return median_ms(graph.replay, target.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-8b", help="one of outrider.testing.synthetic.SHAPES")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--trees", type=int, nargs="+", default=[0], help="nodes; 0: chains")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--taps", type=int, default=5)
    parser.add_argument("--block", type=int, default=7, help="tokens that a block drafts")
    parser.add_argument("--vocab", type=int, default=32_768, help="tokens that it can draft; the target's: all")
    parser.add_argument("--rank", type=int, default=256, help="of the Markov head; 0: none")
    parser.add_argument("--qk-norm", action="store_true")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    decoder = synthetic_pair(args.shape, device=args.device).target
    what = f"{args.layers} layers, block of {args.block}, {args.vocab} tokens, rank {args.rank}"
    print(f"{args.shape} on {args.device}, random block drafter: {what}", flush=True)
    rows: list[dict[str, Any]] = []
    for tree in args.trees:
        for batch in args.batches:
            rows.append(measure(decoder, args, batch, tree))
            told = {key: round(value, 4) if isinstance(value, float) else value for key, value in rows[-1].items()}
            print(json.dumps(told), flush=True)
            if args.json:
                args.json.write_text(json.dumps({**vars(args), "json": None, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
