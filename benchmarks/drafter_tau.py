"""Tokens per pass (τ) of drafters on sets of prompts, greedy and sampled, with the share of distinct bigrams beside it.

    python benchmarks/drafter_tau.py TARGET --sets a.jsonl b.jsonl --drafters block:model=F block:model=F,tree=24

The text is the target's own. A set is a file as `outrider train collect` reads it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from outrider.core.sampling import SamplingParams
from outrider.engine.stats import total
from outrider.llm import LLM
from outrider.train.acceptance import distinct_bigrams
from outrider.train.collect import encode_prompt
from outrider.train.prompts import read_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--sets", nargs="+", required=True, type=Path)
    parser.add_argument("--drafters", nargs="+", required=True)
    parser.add_argument("--modes", nargs="+", default=["seeded"], help="seeded, distribution:block, distribution:token")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--limit", type=int, default=80, help="prompts of each set")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="keep the figures")
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    for drafter in args.drafters:
        for mode in args.modes:
            rows += measure_drafter(args, drafter, *mode.partition(":")[::2])
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def measure_drafter(args: argparse.Namespace, drafter: str, mode: str, rule: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    options = {"mode": mode, "rule": rule or "block", "max_batch": args.batch, "device": args.device}
    with LLM(args.target, drafter=drafter, adaptive=False, **options) as llm:
        for temperature in args.temperatures:
            taus: list[float] = []
            for file in args.sets:
                prompts = [encode_prompt(llm.tokenizer, each) for each in read_prompts(file, args.limit)]
                params = [
                    SamplingParams(max_tokens=args.max_tokens, temperature=temperature, seed=i)
                    for i in range(len(prompts))
                ]
                began = time.perf_counter()
                found = llm.generate(prompts, params, progress=False)
                seconds = time.perf_counter() - began
                stats = total(each.stats for each in found)
                bigrams = sum(distinct_bigrams(list(each.tokens)) for each in found) / len(found)
                taus.append(stats.tau)
                row = {
                    "drafter": drafter, "mode": mode, "rule": rule, "temperature": temperature, "set": file.stem,
                    "tau": stats.tau, "alpha": stats.alpha, "gamma": stats.gamma, "distinct_bigrams": bigrams,
                    "tokens": stats.tokens, "tokens_per_second": stats.tokens / seconds,
                    "by_position": stats.all.acceptance_by_position,
                }  # fmt: skip
                rows.append(row)
                print(
                    f"{drafter} {mode}{rule and ':' + rule} T {temperature:g} {file.stem}: τ {stats.tau:.3f}, "
                    f"α {stats.alpha:.3f}, γ {stats.gamma:.1f}, distinct bigrams {bigrams:.2f}, "
                    f"{stats.tokens / seconds:.0f} tok/s at batch {args.batch}",
                    flush=True,
                )
            print(f"{drafter} {mode} T {temperature:g}: mean τ {sum(taus) / len(taus):.3f}", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
