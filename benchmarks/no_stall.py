"""Whether requests wait for what start-up should have done: start twice, answer 300 mixed requests, name the culprits.

    python benchmarks/no_stall.py [SHAPE ...] [--drafter SPEC] [--device cuda]

Each shape (llama-1b and qwen-1.5b unless given) is saved as a folder of random weights and started in two fresh
processes, with an empty cache of compiled kernels and then with a filled one. Printed for each: the seconds from the
start of the process to "ready", what was compiled, captured or allocated on the device afterwards, with kernels and
signatures, and the slowest first answer over the median of its prompt's length. DRAFT in the drafter's specification
is the folder of a draft model of two layers, as in draft-model:model=DRAFT,k=5.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHAPES = ("llama-1b", "qwen-1.5b")
REQUESTS, MAX_LENGTH, CONTEXT = 300, 4000, 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--began", type=float, default=0.0, help=argparse.SUPPRESS)  # of a process started here
    given = parser.parse_args()
    if given.began:
        serve(given.shapes[0], given.drafter, given.device, given.began)
        return
    for shape in given.shapes:
        with tempfile.TemporaryDirectory() as folder:
            save(shape, Path(folder), given.device)
            for start in ("cold", "warm"):
                print(f"\n{shape}, drafter {given.drafter}, {start} cache", flush=True)
                environment = os.environ | {"OUTRIDER_HOME": f"{folder}/home", "TRITON_CACHE_DIR": f"{folder}/triton"}
                drafter = given.drafter.replace("DRAFT", f"{folder}/draft")
                command = [sys.executable, __file__, f"{folder}/target", "--drafter", drafter]
                command += ["--device", given.device, "--began", str(time.time())]
                subprocess.run(command, env=environment, check=True)


def save(shape: str, folder: Path, device: str) -> None:
    """Write random weights of this shape, and free the device's memory."""
    import torch

    from outrider.testing.synthetic import synthetic_pair

    pair = synthetic_pair(shape, device=device)
    pair.save(folder)
    del pair
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


class Steps:
    """A progress that prints each step with its seconds."""

    def start(self, label: str, total: int | None) -> None:
        self.label, self.total, self.done_steps, self.began = label, total, 0, time.perf_counter()

    def advance(self, amount: int) -> None:
        self.done_steps += amount

    def done(self) -> None:
        print(f"  {time.perf_counter() - self.began:6.1f} s  {self.label}, {self.done_steps} of {self.total or 'them'}")


def serve(model: str, drafter: str, device: str, began: float) -> None:
    """Start up and answer, in this process."""
    from outrider import LLM
    from outrider.bench.stalls import by_length, first_answers, mixed_requests

    print(f"  {time.time() - began:6.1f} s  importing")
    llm = LLM(model, drafter=drafter, device=device, context=CONTEXT, cache_tokens=8 * CONTEXT, progress=Steps())
    print(f"  {time.time() - began:6.1f} s  from the start of the process to ready", flush=True)
    answers = first_answers(llm, mixed_requests(llm, REQUESTS, MAX_LENGTH))
    late = llm.late_work
    print(f"  compiled or captured since ready: {late.compilations}; device allocations: {late.device_allocations}")
    for name in late.names:
        print(f"    {name}")
    buckets = by_length(answers)
    for bucket in buckets:
        print(f"  {bucket}")
    worst = max(bucket.ratio for bucket in buckets)
    print(json.dumps({"compilations": late.compilations, "allocations": late.device_allocations, "worst": worst}))


if __name__ == "__main__":
    main()
