"""`outrider plan` against what an engine really takes: at start, and the most while it serves.

    python benchmarks/plan_memory.py MODEL[,SPEC] ... [--device cuda] [--batch 8] [--context 512]

Each MODEL is a folder, a file, `demo`, or the name of a shape, of which random weights are saved first; SPEC is its
drafter (`none`), in which DRAFT is the folder of that shape's first two layers. Each is started in a process of its
own, and answers prompts that fill its cache, so that all of it is written.

On CUDA all memory of the device that the process takes is counted, CUDA's own included as the plan has it. On the CPU
it is memory that is no file's, looked at every few milliseconds, beyond what the interpreter and its libraries had: a
tiny model answers before.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOOK_SECONDS = 0.004
PERIOD = 13
"""Tokens after which prompts repeat themselves, so that drafters find something to draft."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL[,SPEC]")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # in a process started here
    given = parser.parse_args()
    if given.one:
        target, drafter = given.models
        print(json.dumps(compare(target, drafter, given.device, given.batch, given.context)))
        return
    print("plan ÷ measured at start, plan ÷ measured at the most, measured bytes", flush=True)
    for each in given.models:
        name, _, spec = each.partition(",")
        with tempfile.TemporaryDirectory() as folder:
            target, drafter = saved(name, spec or "none", Path(folder), given.device)
            found = in_process(target, drafter, given.device, given.batch, given.context)
        ratios = found["planned"] / found["start"], found["planned_peak"] / found["peak"]
        print(f"{Path(name).name}, {spec or 'none'}: {ratios[0]:.3f} {ratios[1]:.3f} {found}", flush=True)


def saved(name: str, drafter: str, folder: Path, device: str) -> tuple[str, str]:
    """The model and the drafter to load; those of a shape are written to the folder."""
    from outrider.testing.synthetic import SHAPES, synthetic_pair

    if name not in SHAPES:
        return name, drafter
    target, draft = synthetic_pair(name, layers=2, device=device).save(folder)
    return str(target), drafter.replace("DRAFT", str(draft))


def in_process(target: str, drafter: str, device: str, batch: int, context: int) -> dict[str, int]:
    """As `compare`, in a process of its own. RuntimeError with what it said where it fails."""
    command = [sys.executable, __file__, target, drafter, "--one", "--device", device]
    command += ["--batch", str(batch), "--context", str(context)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def compare(target: str, drafter: str, device: str, batch: int, context: int) -> dict[str, int]:
    """Bytes: planned and taken at start and at the most, tokens of the cache, and what is measured of passes."""
    from outrider.core.sampling import SamplingParams
    from outrider.llm import LLM
    from outrider.loading import memory
    from outrider.plan.estimate import DRIVER
    from outrider.plan.forecast import PlanOptions, make_forecast

    used = _used_of(device)
    options: dict[str, Any] = {"device": device, "max_batch": batch, "context": context}
    plan = make_forecast(target, drafter, PlanOptions(**options))
    workspaces: list[int] = []
    measure = memory.measure_workspace

    def noted(*given: Any) -> int:
        workspaces.append(measure(*given))
        return workspaces[-1]

    memory.measure_workspace = noted
    before = used() + (_start_up_bytes() if device == "cpu" else 0)
    with LLM(target, drafter=drafter, adaptive=False, **options) as llm:
        start = used() - before
        tokens = llm.loaded.target.pool.count * llm.loaded.target.pool.size
        length = min(tokens // batch, context) - 40
        prompts = [[300 + i + k % PERIOD for k in range(length)] for i in range(batch)]
        params = SamplingParams(max_tokens=32, temperature=0.3, top_p=0.95, seed=1, ignore_eos=True)
        if device == "cpu":
            with _highest(_mapped_bytes) as seen:
                llm.generate(prompts, params, progress=False)
            peak = max(seen) - before
        else:  # what the allocator took it keeps
            llm.generate(prompts, params, progress=False)
            peak = used() - before
    own = DRIVER if device == "cuda" else 0
    cache = plan.cache if device == "cpu" else 0  # taken as it is written: all of it is, by now
    return {
        "planned": plan.at_start,
        "start": own + start + cache,
        "planned_peak": plan.peak,
        "peak": own + peak,
        "planned_tokens": plan.tokens,
        "tokens": tokens,
        "planned_workspace": plan.models[0].kept_free,
        "workspace": workspaces[0] if workspaces else 0,
    }


def _used_of(device: str) -> Callable[[], int]:
    if device == "cpu":
        return _anonymous_bytes
    import torch

    torch.zeros(1, device="cuda")

    def used() -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free

    return used


def _anonymous_bytes() -> int:
    """What was freed is given back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _mapped_bytes()


def _mapped_bytes() -> int:
    """Of no file. A cache lies in memory that is mapped as shared."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))


def _start_up_bytes() -> int:
    """What is not the plan's: libraries that a first answer loads."""
    from outrider.llm import LLM
    from outrider.testing.synthetic import synthetic_pair

    before = _anonymous_bytes()
    with tempfile.TemporaryDirectory() as folder:
        tiny, _ = synthetic_pair("tiny").save(Path(folder))
        with LLM(str(tiny), drafter="suffix", device="cpu") as llm:
            llm.generate([[5, 6, 7] * 5], max_tokens=8, temperature=0.5, progress=False)
    return _anonymous_bytes() - before


@contextmanager
def _highest(used: Callable[[], int]) -> Iterator[list[int]]:
    """Looks at memory while the block runs: what is seen."""
    seen, ended = [used()], threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_SECONDS):
            seen.append(used())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


if __name__ == "__main__":
    main()
