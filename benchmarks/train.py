"""Train a drafter from prompts in one command, and tell where the time goes. Cut at any time, it continues.

    python benchmarks/train.py TARGET --prompts PATH --out FOLDER [--kind block] [--minutes 8] [-- --lr 1e-3 ...]

What follows `--` goes to `outrider train KIND`. Timings are printed and kept in FOLDER/timings.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--kind", default="block", choices=["block", "eagle3", "medusa"])
    parser.add_argument("--limit", type=int, help="prompts (all)")
    parser.add_argument("--max-tokens", type=int, default=400, help="of an answer")
    parser.add_argument("--batch", type=int, default=0, help="sequences at once in each process of the collection")
    parser.add_argument("--workers", type=int, default=0, help="processes of the collection")
    parser.add_argument("--collect-seconds", type=float, help="end the collection after this time, with what there is")
    parser.add_argument("--minutes", type=float, default=0.0, help="end the training after this time")
    parser.add_argument("--measured", type=int, default=8, help="prompts to measure the speed on at the end")
    own, rest = (sys.argv[1:], []) if "--" not in sys.argv else split(sys.argv[1:])
    args = parser.parse_args(own)
    answers, run = args.out / "answers", args.out / args.kind
    timings: dict[str, float] = {}
    collect = ["collect", args.target, "--prompts", args.prompts, "--out", str(answers)]
    collect += ["--max-tokens", str(args.max_tokens), "--batch", str(args.batch), "--workers", str(args.workers)]
    collect += ["--limit", str(args.limit)] if args.limit else []
    timed(timings, "collect", collect, args.collect_seconds)
    train = [args.kind, args.target, "--answers", str(answers), "--out", str(run), "--resume", *rest]
    train += ["--max-minutes", str(args.minutes), "--measured", str(args.measured)]
    timed(timings, args.kind, train, None)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "timings.json").write_text(json.dumps(timings, indent=1))
    for name, seconds in timings.items():
        print(f"{name:10} {seconds:8.1f} s")
    print(f"{'in all':10} {sum(timings.values()):8.1f} s")


def split(words: list[str]) -> tuple[list[str], list[str]]:
    at = words.index("--")
    return words[:at], words[at + 1 :]


def timed(timings: dict[str, float], name: str, words: list[str], limit: float | None) -> None:
    """Run a command of `outrider train`. At its limit it is interrupted, which loses nothing."""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "outrider", "train", *words])
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        process.send_signal(2)  # SIGINT: answers so far are written
        process.wait()
        code = 0
    timings[name] = time.monotonic() - began
    print(f"{name}: {timings[name]:.1f} s", flush=True)
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
