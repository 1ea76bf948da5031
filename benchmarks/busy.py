"""The speed of plain decoding beside other busy processes, by number of threads: fixed, and chosen as it runs.

    python benchmarks/busy.py [--model demo] [--quantize none] [--busy 0,1,2,4] [--repeats 15] [--tokens 24]

The same process and weights for all columns, which take turns; medians. The last column is the chooser's speed over
that of the better fixed number, and should be at least 0.9.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from outrider import LLM
from outrider.runners.native import NativeRunner
from outrider.runners.threads import ThreadChooser

PROMPT = "Write about the sea and ships."
BAR = 0.9


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Within, so many processes each keep a core busy."""
    code = f"import os\nwhile os.getppid() == {os.getpid()}: pass"  # they end where this process is killed
    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


class Timer:
    """Decodes with one chooser after another."""

    def __init__(self, model: str, quantize: str, tokens: int) -> None:
        self.llm = LLM(model, drafter="none", device="cpu", quantize=quantize)
        self.tokens = tokens
        target = self.llm.loaded.target
        if not isinstance(target, NativeRunner):
            raise SystemExit(f"{model} runs on Transformers' code; choose a model of a native family")
        self.model = target.model

    def time(self, chooser: ThreadChooser) -> float:
        """Tokens per second, the prompt included."""
        self.model.threads = chooser
        began = time.perf_counter()
        self.llm.generate(PROMPT, max_tokens=self.tokens, ignore_eos=True)
        return self.tokens / (time.perf_counter() - began)


def measure(timer: Timer, counts: tuple[int, ...], busy: int, repeats: int) -> dict[str, float]:
    """The median speed of each column. The chooser begins with the most threads and is given time to move."""
    columns = {f"{count} fixed": ThreadChooser((count,)) for count in reversed(counts)}
    columns["chosen"] = ThreadChooser(counts)
    rates: dict[str, list[float]] = {name: [] for name in columns}
    with busy_processes(busy):
        for _ in range(3):
            timer.time(columns["chosen"])
        for _ in range(repeats):
            for name, chooser in columns.items():
                rates[name].append(timer.time(chooser))
    return {name: statistics.median(each) for name, each in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--busy", default="0,1,2,4")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()
    timer = Timer(args.model, args.quantize, args.tokens)
    counts = timer.model.threads.counts
    spin = os.environ.get("GOMP_SPINCOUNT") or os.environ.get("OMP_WAIT_POLICY")
    print(f"{args.model}, quantize {args.quantize}, {os.cpu_count()} cores, spinning {spin}, tok/s")
    print(f"at start: {timer.llm.loaded.threads}")
    for i, busy in enumerate(map(int, args.busy.split(","))):
        found = measure(timer, counts, busy, args.repeats)
        if i == 0:
            print("busy  " + "  ".join(f"{name:>8}" for name in found) + "  chosen / best")
        best = max(rate for name, rate in found.items() if name != "chosen")
        ratio = found["chosen"] / best
        row = "  ".join(f"{rate:8.1f}" for rate in found.values())
        print(f"{busy:4}  {row}  {ratio:6.2f}{'' if ratio >= BAR else '  below ' + str(BAR)}", flush=True)


if __name__ == "__main__":
    main()
