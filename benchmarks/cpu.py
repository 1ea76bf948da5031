"""The speed table of this machine: every figure is a ratio of two rows timed in the same run.

    python benchmarks/cpu.py [--model demo] [--repeats 3] [--tokens 96] [--llama PYTHON] [--json FILE]

Rows are timed round-robin, `--repeats` times, and the median is reported. Tokens per second
count the tokens after the first; every speculative text is compared with the plain one.
With `--model FILE.gguf --llama PYTHON`, a Python that has llama-cpp-python (see llama_peer.py), llama.cpp runs the same
file and prompts in the same rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from outrider import LLM, SamplingParams
from outrider.checkpoints.folder import gguf_of
from outrider.checkpoints.resolve import convert_file, resolve
from outrider.core.draft import Draft
from outrider.core.errors import LosslessError
from outrider.core.sequence import Span
from outrider.engine.results import Result
from outrider.engine.stats import Stats, total

PROMPTS: dict[str, list[str]] = json.loads((Path(__file__).parent / "prompts.json").read_text())
DRAFTERS = ("suffix", "prompt-lookup", "mix")


@dataclass
class Row:
    """One row: its name, the row it is compared with, and the ratio it must reach."""

    name: str
    run: Callable[[], float]  # tokens per second
    base: str = ""
    bar: float | None = None
    note: Callable[[], str] = lambda: ""
    rates: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


def messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


class OutriderTimer:
    """Times one LLM; every text is kept, and must be the same each time."""

    def __init__(self, model: str, tokens: int, drafter: str = "none", exact: bool = False, **options: Any) -> None:
        """exact: continue past the end of text, to as many tokens as the other rows."""
        self.llm = LLM(model, drafter=drafter, **options)
        self.params = SamplingParams(max_tokens=tokens, ignore_eos=exact)
        self.salt = 0
        self.texts: dict[str, tuple[int, ...]] = {}
        self.stats: list[Stats] = []

    def time_each(self, prompts: Iterable[str]) -> float:
        """One prompt after another with cold caches; tokens per second after each first token."""
        results = [self._complete(prompt) for prompt in prompts]
        self.stats = [r.stats for r in results]
        tokens = sum(s.tokens - s.first_tokens for s in self.stats)
        return tokens / sum(s.ended - s.first for s in self.stats)

    def time_together(self, prompts: list[str]) -> float:
        """All in one batch; tokens per second, prefill included."""
        self.salt += 1
        ids = [self.llm.tokenizer.encode_chat(messages(p)) for p in prompts]
        began = time.perf_counter()
        results = self.llm.generate(ids, self.params, salt=str(self.salt))
        return sum(len(r.tokens) for r in results) / (time.perf_counter() - began)

    def time_in_turn(self, prompts: list[str]) -> float:
        """One after another; tokens per second, prefill included."""
        began = time.perf_counter()
        results = [self._complete(prompt) for prompt in prompts]
        return sum(len(r.tokens) for r in results) / (time.perf_counter() - began)

    def time_prompt(self, ids: list[int]) -> float:
        """Tokens of a prompt per second, in one pass of an empty cache."""
        return self._time_pass(Span(-1, 0, tuple(ids)), len(ids))

    def time_rows(self, rows: int) -> float:
        """Passes per second, each of so many rows behind a text of 128 tokens: the best of five."""
        text = tuple(range(100, 228))
        span = Span(-1, len(text), (1,), Draft(tokens=text[: rows - 1]))
        return max(self._time_pass(span, 1) for _ in range(5))

    def _time_pass(self, span: Span, count: int) -> float:
        target = self.llm.loaded.target
        target.pool.open(span.seq_id, (), "")
        target.pool.reserve(span.seq_id, span.start + span.width)
        began = time.perf_counter()
        target.score([span])
        seconds = time.perf_counter() - began
        target.release(span.seq_id, unpublish=True)
        return count / seconds

    def _complete(self, prompt: str) -> Result:
        self.salt += 1
        result = self.llm.chat(messages(prompt), self.params, salt=str(self.salt))
        if self.texts.setdefault(prompt, result.tokens) != result.tokens:
            raise LosslessError(f"two runs of one prompt differ: {prompt[:40]!r}")
        return result


class TransformersTimer:
    """Times Transformers' generate on the same weights."""

    def __init__(self, model: str, tokens: int, **options: Any) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = resolve(model)
        if reference := gguf_of(folder):  # Transformers reads a copy
            folder = convert_file(Path(reference.file))
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokens, self.options = tokens, options

    @torch.inference_mode()
    def time_each(self, prompts: Iterable[str]) -> float:
        tokens, seconds = 0, 0.0
        for prompt in prompts:
            ids = self.tokenizer.apply_chat_template(
                messages(prompt), add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            times = [self._time(ids, n) for n in (1, self.tokens)]
            tokens += self.tokens - 1
            seconds += times[1] - times[0]
        return tokens / seconds

    def _time(self, ids: Any, tokens: int) -> float:
        began = time.perf_counter()
        self.model.generate(**ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **self.options)
        return time.perf_counter() - began


class LlamaTimer:
    """Times llama.cpp in a process of its own, which sleeps while others are timed."""

    def __init__(self, python: str, file: str) -> None:
        script = Path(__file__).with_name("llama_peer.py")
        self.process = subprocess.Popen(
            [python, str(script), file, str(os.cpu_count())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **command: Any) -> float:
        if self.process.stdin is None or self.process.stdout is None:
            raise OSError("llama.cpp's process has no pipes")
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def peer_rows(args: argparse.Namespace) -> list[Row]:
    """llama.cpp, our plain decoding on PyTorch's operators and on the CPU kernels, `suffix` and `auto`.

    All of the file's own blocks.
    """
    llama, pytorch, kernels = (
        LlamaTimer(args.llama, args.model),
        on_pytorch(args),
        OutriderTimer(args.model, args.tokens),
    )
    ids = list(range(100, 500))
    table: list[Row] = []
    for kind in ("chat", "copy"):
        prompts, base = PROMPTS[kind], f"{kind}: llama.cpp plain"
        for mode in ("plain", "lookup"):
            asked = {"mode": mode, "prompts": prompts, "tokens": args.tokens}
            table.append(
                Row(f"{kind}: llama.cpp {mode}", lambda a=asked: llama.ask(**a), base if mode != "plain" else "")
            )
        table.append(Row(f"{kind}: PyTorch's operators", lambda p=prompts: pytorch.time_each(p), base))
        table.append(Row(f"{kind}: CPU kernels", lambda p=prompts: kernels.time_each(p), base, 1.0))
        for drafter in ("suffix", "auto"):
            timer = OutriderTimer(args.model, args.tokens, drafter=drafter)
            timer.texts = kernels.texts
            bar = 1.3 if kind == "chat" else 2.0
            row = Row(f"{kind}: CPU kernels, {drafter}", lambda o=timer, p=prompts: o.time_each(p), base, bar)
            row.note = stats_note(lambda o=timer: o)
            table.append(row)
    table.append(Row("prompt of 400: llama.cpp", lambda: llama.ask(mode="plain", ids=ids)))
    table.append(Row("prompt of 400: CPU kernels", lambda: kernels.time_prompt(ids), "prompt of 400: llama.cpp", 0.8))
    return table


def stats_note(timer: Callable[[], OutriderTimer]) -> Callable[[], str]:
    def note() -> str:
        stats = total(timer().stats)
        cost = stats.times.draft / max(1, stats.all.drafted) * 1e6
        return f"α {stats.all.alpha:.2f}  γ {stats.all.gamma:.1f}  τ {stats.all.tau:.2f}  draft {cost:.0f} µs a token"

    return note


def rows(args: argparse.Namespace) -> list[Row]:
    """Models are loaded by the first row that needs them."""
    one = PROMPTS["chat"][:2]
    transformers = cache(lambda: TransformersTimer(args.model, args.tokens))
    full = cache(lambda: OutriderTimer(args.model, args.tokens, exact=True, quantize="none"))
    four = cache(lambda: OutriderTimer(args.model, args.tokens, exact=True, quantize="int4"))
    packed = cache(lambda: OutriderTimer(args.model, args.tokens, quantize="int4"))
    table = [
        Row("Transformers generate, float32", lambda: transformers().time_each(one)),
        Row("plain, float32", lambda: full().time_each(one), "Transformers generate, float32", 1.3),
        Row("plain, 4-bit", lambda: four().time_each(one), "Transformers generate, float32", 3.5),
    ]
    for kind, bar in (("copy", 1.6), ("chat", 0.95)):
        prompts, base = PROMPTS[kind], f"{kind}: plain, 4-bit"
        table.append(Row(base, lambda p=prompts: packed().time_each(p)))
        for drafter in DRAFTERS:
            timer = cache(lambda d=drafter: OutriderTimer(args.model, args.tokens, drafter=d, quantize="int4"))

            def run(timer: Callable[[], OutriderTimer] = timer, prompts: list[str] = prompts) -> float:
                timer().texts = packed().texts  # the same dictionary: any difference raises
                return timer().time_each(prompts)

            table.append(Row(f"{kind}: {drafter}", run, base, bar, stats_note(timer)))
    table += [
        Row("eight in turn, 4-bit", lambda: packed().time_in_turn(PROMPTS["chat"])),
        Row("eight together, 4-bit", lambda: packed().time_together(PROMPTS["chat"]), "eight in turn, 4-bit", 3.0),
        Row("passes of 1 row, 4-bit", lambda: packed().time_rows(1)),
        Row("passes of 4 rows, 4-bit", lambda: packed().time_rows(4), "passes of 1 row, 4-bit", 1 / 1.4),
        Row("passes of 8 rows, 4-bit", lambda: packed().time_rows(8), "passes of 1 row, 4-bit", 1 / 2.0),
    ]
    return table + (peer_rows(args) if args.llama else [])


def on_pytorch(args: argparse.Namespace) -> OutriderTimer:
    """The same model without the CPU kernels."""
    before = os.environ.get("OUTRIDER_NATIVE")
    os.environ["OUTRIDER_NATIVE"] = "0"
    try:
        return OutriderTimer(args.model, args.tokens)
    finally:
        del os.environ["OUTRIDER_NATIVE"]
        if before is not None:
            os.environ["OUTRIDER_NATIVE"] = before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--only", default="", help="rows whose name holds this, and their bases")
    parser.add_argument("--llama", default="", help="a Python that has llama-cpp-python; --model is then a .gguf file")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    table = rows(args)
    if args.only:
        wanted = {r.name for r in table if args.only in r.name}
        wanted |= {r.base for r in table if r.name in wanted}
        table = [r for r in table if r.name in wanted]
    for repeat in range(args.repeats + 1):
        for row in table:
            gc.collect()
            rate = row.run()
            print(f"  {'warm-up' if repeat == 0 else repeat}: {row.name}: {rate:.1f} tok/s", flush=True)
            if repeat:
                row.rates.append(rate)
    report(table, args)


def report(table: list[Row], args: argparse.Namespace) -> None:
    rates = {row.name: row.rate for row in table}
    chip = platform.processor() or platform.machine()
    print(f"\n{chip}, {torch.get_num_threads()} threads, torch {torch.__version__}; ", end="")
    print(f"greedy, {args.tokens} new tokens, median of {args.repeats}\n")
    for row in table:
        ratio = f"{row.rate / rates[row.base]:5.2f} x" if row.base else "     -  "
        bar = f"(bar {row.bar:.3g})" if row.bar else ""
        print(f"{row.name:34} {row.rate:8.1f} tok/s {ratio} {bar:10} {row.note()}")
    if args.json:
        rows_out = [
            {
                "name": row.name,
                "tokens_per_second": row.rate,
                "all": row.rates,
                "base": row.base,
                "ratio": row.rate / rates[row.base] if row.base else None,
                "bar": row.bar,
                "note": row.note(),
            }
            for row in table
        ]
        args.json.write_text(json.dumps(rows_out, indent=1))


if __name__ == "__main__":
    main()
