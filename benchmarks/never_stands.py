"""What drafting from the text costs where no draft is accepted: tokens per second of each drafter over plain decoding.

    python benchmarks/never_stands.py [--shape llama-8b] [--batches 1 8 32 128]

Random weights of a real shape and random prompts: texts repeat themselves only by chance. Needs a CUDA device for
figures that mean anything; `--shape tiny` runs anywhere. "of plain" is that of decoding, "whole" with reading prompts.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import NamedTuple

import torch

from outrider.bench.llm_factory import LLMFactory
from outrider.bench.syncs import SyncCounter
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.llm import LLM
from outrider.testing.synthetic import synthetic_pair

DRAFTERS = ("none", "suffix", "prompt-lookup", "auto", "draft-model:model=synthetic,k=5")


def start(llm: LLM, prompts: list[list[int]], tokens: int, salt: str) -> list[Sequence]:
    """Sequences that decode, all prompts read. At temperature 1 a text hardly falls into a loop."""
    params = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True, seed=1)
    ids = [llm.engine.submit(llm.request(prompt, params, salt=salt))[0] for prompt in prompts]
    seqs = [llm.engine.live(i).seq for i in ids]
    while not all(seq.generated for seq in seqs):
        llm.engine.step()
    return seqs


def finish(llm: LLM) -> int:
    """Run to the end; returns how many rounds that took."""
    rounds = 0
    while llm.engine.busy:
        llm.engine.step()
        rounds += 1
    return rounds


class Speed(NamedTuple):
    """Tokens per second."""

    decoding: float
    """From when all prompts are read to the end."""
    whole: float
    """From the first prompt on."""


def speed(llm: LLM, prompts: list[list[int]], tokens: int, salt: str) -> Speed:
    began = time.perf_counter()
    seqs = start(llm, prompts, tokens, salt)
    read, before = time.perf_counter(), sum(seq.generated for seq in seqs)
    finish(llm)
    ended, made = time.perf_counter(), sum(seq.generated for seq in seqs)
    return Speed((made - before) / (ended - read), made / (ended - began))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-8b", help="one of outrider.testing.synthetic.SHAPES")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3, help="the fastest counts")
    parser.add_argument("--drafters", nargs="+", default=DRAFTERS)
    parser.add_argument("--fixed", action="store_true", help="without the controller, which drafts where it pays")
    parser.add_argument("--agreement", type=float, default=0.01, help="how often draft model and target agree")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pair = synthetic_pair(options.shape, agreement=options.agreement, device=device)
    context, rng = options.prompt + options.tokens + 64, random.Random(0)
    factory = LLMFactory(pair, cache_tokens=max(options.batches) * (context + 64), context=context)
    vocab = pair.target.config.vocab_size
    print(f"{'batch':>5} {'drafter':>31} {'tok/s':>9} {'of plain':>8} {'whole':>6} {'waits':>6} {'accepted':>8}")
    for batch in options.batches:
        plain: Speed | None = None
        for name in options.drafters:
            llm = factory.llm(name, max_batch=batch, max_round_tokens=max(2048, batch * 16), adaptive=not options.fixed)
            runs = [
                [[rng.randrange(vocab) for _ in range(options.prompt)] for _ in range(batch)]
                for _ in range(options.repeats + 1)
            ]
            start(llm, runs[0], options.tokens, f"{name} {batch}")  # warms up
            with SyncCounter() as waits:
                rounds = finish(llm)
            found = max(speed(llm, run, options.tokens, f"{name} {batch}") for run in runs[1:])
            plain = plain or found
            shares = f"{found.decoding / plain.decoding:>8.3f} {found.whole / plain.whole:>6.3f}"
            figures = f"{found.decoding:>9.0f} {shares} {waits.count / rounds:>6.1f}"
            print(f"{batch:>5} {name:>31} {figures} {llm.engine.stats.all.accepted:>8}")


if __name__ == "__main__":
    main()
