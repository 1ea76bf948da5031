"""The speed table of one GPU, compared with its memory bandwidth and with Transformers in the same run.

    python benchmarks/gpu.py [--only plain,spec] [--seconds 480] [--json FILE]
    python benchmarks/gpu.py --shape tiny --device cpu        # checks that every part runs; the figures mean nothing

Every configuration runs twice and the second run is reported: kernels are compiled and graphs
captured in the first. `tok/s` is of the window in which the whole batch decodes; `whole` includes
prefill. `limit` is the time to read a round's weights and cache at the measured bandwidth, over
the time of the round: target weights once, draft weights once per draft token.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import traceback
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from gpu_frame import Bench, OutOfTime, Plan, Row, read_bandwidth
from gpu_parts import PARTS

from outrider.testing.synthetic import SHAPES, weight_bytes

TINY = {"prompt": 24, "new": 24, "batches": (1, 4), "contexts": (24, 96), "widths": (1, 4, 6), "pinned_prompts": 4}
COLUMNS = (
    "what",
    "batch",
    "ctx",
    "tok/s",
    "whole",
    "limit",
    "τ",
    "ms",
    "draft",
    "verify",
    "rest",
    "host",
    "waits",
    "s",
)
Bar = tuple[str, float, float, float, bool]
"""Name, measured value, required value, goal, and whether more is better."""


def main() -> None:
    args = parse()
    plan = make_plan(args)
    bench = Bench(plan, time.monotonic() + args.seconds, lambda row: print("  " + line(row), flush=True))
    facts = about(plan)
    print(f"{facts['device']}, torch {facts['torch']}, Triton {facts['triton']}, Transformers {facts['transformers']}")
    bench.bandwidth = read_bandwidth(plan.device, plan.shape == "tiny")
    facts |= limit_facts(bench)
    print(
        f"read {facts['bandwidth'] / 1e12:.3f} TB/s; {plan.shape}: {facts['weight_bytes'] / 1e9:.2f} GB a pass, "
        f"limit {facts['limit_tokens_per_second']:.1f} tok/s without speculation"
    )
    facts["skipped"] = []
    for name in (name for name in PARTS if name in args.only):
        run(bench, name, facts["skipped"])
        if args.json:
            save(args.json, bench, facts)
    report(bench, facts)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-8b", choices=SHAPES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, of {','.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=480, help="start no new part after this long")
    parser.add_argument("--agreement", type=float, default=1.0, help="how often draft and target should agree")
    parser.add_argument("--layers", type=int, default=2, help="of the target's, that make the draft")
    parser.add_argument("--batches", help="such as 1,8,32,128")
    parser.add_argument("--contexts", help="such as 256,4096,32768")
    parser.add_argument("--widths", help="such as 1,4,6,8,16,32")
    parser.add_argument("--new", type=int, help="new tokens")
    parser.add_argument("--prompt", type=int, help="prompt tokens")
    parser.add_argument("--model", default="", help="folder of the real small model; the installed demo model")
    parser.add_argument("--folder", type=Path, help="where weights are saved temporarily; the temporary folder")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.only = [name.strip() for name in args.only.split(",") if name.strip()]
    if unknown := [name for name in args.only if name not in PARTS]:
        parser.error(f"no part called {unknown[0]!r}; choose among {', '.join(PARTS)}")
    return args


def make_plan(args: argparse.Namespace) -> Plan:
    device = torch.device(args.device)
    plan = Plan(shape=args.shape, device=device, layers=args.layers, agreement=args.agreement, model=args.model)
    if args.shape == "tiny":
        plan = replace(plan, small="tiny", **TINY)
    given: dict[str, Any] = {n: getattr(args, n) for n in ("prompt", "new", "folder") if getattr(args, n) is not None}
    for name in ("batches", "contexts", "widths"):
        if getattr(args, name):
            given[name] = tuple(int(part) for part in getattr(args, name).split(","))
    return replace(plan, **given)


def run(bench: Bench, name: str, skipped: list[str]) -> None:
    """Run one part. If it fails or runs out of time, that is noted and the next part runs."""
    began = time.monotonic()
    print(f"{name}:", flush=True)
    try:
        bench.check_time()
        PARTS[name](bench)
    except OutOfTime:
        skipped.append(f"{name}: out of time")
    except Exception as error:
        traceback.print_exc()
        skipped.append(f"{name}: {type(error).__name__}: {error}")
    print(f"  ({name} took {time.monotonic() - began:.0f} s)", flush=True)


def save(file: Path, bench: Bench, facts: dict[str, Any]) -> None:
    """Write all results so far: an interrupted run keeps its figures."""
    names = ("what", "measured", "must", "goal", "more_is_better")
    bars = [dict(zip(names, bar, strict=True)) for bar in bars_of(bench, facts)]
    report = facts | {"rows": [asdict(row) for row in bench.rows], "waits_by_line": dict(bench.waited), "bars": bars}
    file.write_text(json.dumps(report, indent=1, allow_nan=False))


def about(plan: Plan) -> dict[str, Any]:
    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "none"

    cuda = plan.device.type == "cuda"
    name = torch.cuda.get_device_name(plan.device) if cuda else platform.processor() or platform.machine()
    facts: dict[str, Any] = {"device": name, "shape": plan.shape, "layers": plan.layers, "agreement": plan.agreement}
    facts |= {package: of(package) for package in ("torch", "triton", "transformers")}
    return facts | {"prompt": plan.prompt, "new": plan.new, "cuda": torch.version.cuda}


def limit_facts(bench: Bench) -> dict[str, Any]:
    pair = bench.pair
    return {
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "epsilon": pair.epsilon,
        "bandwidth": bench.bandwidth,
        "weight_bytes": weight_bytes(pair.target),
        "draft_weight_bytes": weight_bytes(pair.draft),
        "limit_tokens_per_second": bench.bandwidth / weight_bytes(pair.target),
    }


def bars_of(bench: Bench, facts: dict[str, Any]) -> list[Bar]:
    """The required values of the published shape on an H200, with what was measured; none where it was not."""

    def find(section: str, name: str, batch: int = 1) -> Row | None:
        rows = (r for r in bench.rows if r.section == section and r.name.startswith(name) and r.batch == batch)
        return next(rows, None)

    def rate(row: Row | None) -> float | None:
        return row and row.tokens_per_second

    def host_share(name: str, row: Row | None) -> float | None:
        """The share of a round outside its graphs: the host, copies, sampling, gaps."""
        passes = find("graphs", f"graphs of a round, {name}")
        return 1 - passes.round_ms / row.round_ms if row and row.round_ms and passes and passes.round_ms else None

    def waited(name: str) -> float | None:
        row = find("waits", f"waits a round, {name}")
        return row and row.waits

    one, six = find("widths", "score, 1 rows"), find("widths", "score, 6 rows")
    plain, spec = find("plain", "plain"), find("spec", "draft-model")
    equal = [r.equal for r in bench.rows if r.name.startswith("pinned: equal") and r.equal is not None]
    pinned, first = find("pinned", "pinned plain"), find("start", "start to graphs")
    ours, theirs = find("small", "small model, plain"), find("small", "small model, Transformers")
    small, step = find("small", "plain, qwen-1.5b"), find("small", "draft step")
    limit = facts["limit_tokens_per_second"]
    wanted: list[tuple[str, float | None, float, float, bool]] = [
        ("plain, batch 1, of the limit", (rate(plain) or 0) / limit or None, 0.85, 0.92, True),
        ("6 rows / 1 row", six.round_ms / one.round_ms if six and one else None, 1.08, 1.03, False),
        ("speculative, batch 1, tok/s", rate(spec), 750, 950, True),
        ("speculative, batch 8, tok/s", rate(find("spec", "draft-model", 8)), 4500, 7000, True),
        ("speculative, batch 32, tok/s", rate(find("spec", "draft-model", 32)), 13_500, 20_000, True),
        ("plain, batch 32, tok/s", rate(find("plain", "plain", 32)), 5050, 6500, True),
        ("host share, batch 1, plain", host_share("plain", plain), 0.05, 0.02, False),
        ("host share, batch 1, speculative", host_share("draft-model", spec), 0.05, 0.02, False),
        ("waits a round, plain", waited("plain"), 1, 0, False),
        ("waits a round, speculative", waited("draft-model"), 1, 0, False),
        ("start to first token and graphs, s", first and first.seconds, 60, 25, False),
        ("pinned: texts equal", max(equal, default=None) if len(equal) < 2 else min(equal), 1, 1, True),
        ("pinned / plain, batch 1", rate(pinned) / rate(plain) if pinned and plain else None, 0, 0.95, True),
        ("plain, 1.5B shape, of the limit", small and small.of_limit, 0.65, 0.78, True),
        ("draft step, 0.5B shape, ms", step and step.round_ms, 0.5, 0.35, False),
        ("small model / Transformers", rate(ours) / rate(theirs) if ours and theirs else None, 6, 6, True),
    ]
    return [(what, value, must, goal, more) for what, value, must, goal, more in wanted if value is not None]


def report(bench: Bench, facts: dict[str, Any]) -> None:
    bars = bars_of(bench, facts)
    print(
        f"\n{facts['device']}, torch {facts['torch']}, Triton {facts['triton']}; {facts['shape']} {facts['dtype']}, "
        f"draft of {facts['layers']} layers; read {facts['bandwidth'] / 1e12:.3f} TB/s, "
        f"limit {facts['limit_tokens_per_second']:.1f} tok/s; greedy, {facts['prompt']} + {facts['new']} tokens\n"
    )
    print(head())
    for row in bench.rows:
        print(line(row))
    if bench.waited:
        print("\nthe host waited at: " + ", ".join(f"{where} ({n})" for where, n in bench.waited.most_common()))
    for reason in facts["skipped"]:
        print(f"left out: {reason}")
    if bars and facts["shape"] == "llama-8b":
        print("\nwanted:")
        for what, value, must, goal, more in bars:
            met = value >= must if more else value <= must
            best = value >= goal if more else value <= goal
            said = "goal" if best else "met" if met else "MISSED"
            print(f"  {what:38} {value:10.3f}  must {must:g}, goal {goal:g}: {said}")


def cells(row: Row) -> list[str]:
    def shown(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    waits, seconds = shown(row.waits, 1), shown(row.seconds, 1)
    share = "" if row.host_share is None else f"{100 * row.host_share:.1f}%"
    numbers = [shown(row.tokens_per_second, 1), shown(row.whole_tokens_per_second, 1), shown(row.of_limit, 3)]
    numbers += [shown(row.tau, 2), *(shown(ms, 3) for ms in (row.round_ms, row.draft_ms, row.verify_ms, row.rest_ms))]
    return [row.name, str(row.batch), str(row.context or ""), *numbers, share, waits, seconds]


WIDTHS = (34, 5, 6, 9, 9, 6, 5, 8, 7, 8, 7, 6, 5, 6)


def aligned(texts: list[str]) -> str:
    first, *rest = (
        text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(texts, WIDTHS, strict=True))
    )
    return " ".join([first, *rest])


def head() -> str:
    return aligned(list(COLUMNS))


def line(row: Row) -> str:
    return f"{aligned(cells(row))}  {row.note}".rstrip()


if __name__ == "__main__":
    main()
