"""What `auto` decides in a batch that is served, without a card: the whole engine over stand-ins, by their clock.

    python benchmarks/served_rounds.py [--batches 1 4 16] [--standing 0.35 0.5 0.6 0.75] [--host 0.55] [--lookups]

As host_rounds.py, whose engine and clock these are. Texts of 64 to 192 tokens, the next one beginning where one ends; a
draft token stands with the given chance. Prints tokens a second of plain decoding, and over that the head with drafts
of 7, of 3, and `auto`; then what `auto` chose most often, in per cent of the rounds. Lookups find nothing, or with
`--lookups` drafts as good as the head's, which take the host longer. `--plans N`: the first plans of each.

Passes take what those of SmolLM2-135M take on an H200; `--host` is a second of the host there, of one here. Between
two runs `auto` differed by up to 5 %, the others by 2.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import Counter
from typing import Any

import card_stand_ins
import numpy as np
from card_stand_ins import VOCAB, Card
from host_rounds import PROMPT, Rounds

from outrider.control.controller import Controller
from outrider.core.sampling import SamplingParams
from outrider.engine.request import Request

PASS_MS = {1: 0.285, 8: 0.29, 16: 0.343, 32: 0.41, 64: 0.525, 128: 0.95, 512: 2.0}
"""Of a target's pass, by rows."""
ENGINES = {"plain": ("none", None), "head 7": ("head", None), "head 3": ("head", 3), "auto": ("auto", None)}
"""The drafter, and max tokens of a draft."""


def find_nothing(lookup: Any, match: int) -> None:
    found, k = lookup.found.numpy(), lookup.k
    found[:] = 0
    found[:, :k] = np.full((len(found), k), -1)


def serve(rounds: Rounds, max_draft: int | None, texts: int, seed: int) -> tuple[float, Counter[tuple[str, int]]]:
    """Tokens a second of so many texts a sequence of the batch, and what was chosen in how many rounds."""
    engine, rng, tokens, chosen = rounds.engine, random.Random(seed), 0, Counter[tuple[str, int]]()
    asked = [
        Request(
            prompt=tuple(rng.randrange(VOCAB) for _ in range(PROMPT)),
            params=SamplingParams(max_tokens=rng.randrange(64, 193), ignore_eos=True),
            max_draft=max_draft,
        )
        for _ in range(texts * rounds.batch)
    ]
    began = rounds.card.now()
    for _ in range(rounds.batch):
        engine.submit(asked.pop())
    while engine.busy:
        for event in engine.step():
            tokens += len(event.tokens)
            if event.stats is not None:
                chosen.update(event.stats.decisions.lengths if event.stats.decisions else {})
                if asked:
                    engine.submit(asked.pop())
    return tokens / (rounds.card.now() - began), chosen


def plans_of(controller: Controller, into: list[str]) -> None:
    """Note every plan from now on, and what it promises."""
    make = controller.plan

    def plan(seq_ids: Any, budgets: Any) -> Any:
        made = make(seq_ids, budgets)
        kind, probe = made.kind, ", a probe" if made.probe else ""
        into.append(
            f"    {len(seq_ids):>3} texts, width {kind.width}, {'+'.join(kind.drafters) or 'nobody':>18}: "
            f"{made.tokens:.1f} tokens in {1e6 * made.seconds:.0f} us{probe}"
        )
        return made

    controller.plan = plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--standing", type=float, nargs="+", default=[0.35, 0.5, 0.6, 0.75])
    parser.add_argument("--host", type=float, default=0.55)
    parser.add_argument("--texts", type=int, default=6, help="of each sequence of a batch, in each of two runs")
    parser.add_argument("--lookups", action="store_true", help="lookups find drafts as good as the head's")
    parser.add_argument("--plans", type=int, default=0)
    given = parser.parse_args()
    card_stand_ins.PASS_MS = PASS_MS
    card_stand_ins.HEAD_MS, card_stand_ins.PROMPT_MS, card_stand_ins.READ_MS = 0.09, 0.35, 0.06
    if not given.lookups:
        card_stand_ins._find = find_nothing  # pyright: ignore[reportPrivateUsage]
    print(f"batch stands {'plain':>9} " + " ".join(f"{name:>7}" for name in list(ENGINES)[1:]) + "  auto chose")
    for batch in given.batches:
        for standing in given.standing:
            speeds, chosen, plans = dict[str, float](), Counter[tuple[str, int]](), list[str]()
            for name, (drafter, max_draft) in ENGINES.items():
                rounds = Rounds(drafter, batch, Card(given.host, standing))
                serve(rounds, max_draft, 2, 0)  # warms up
                controller = rounds.engine.drafting.controller
                if given.plans and controller is not None and name == "auto":
                    plans_of(controller, plans)
                runs = [serve(rounds, max_draft, given.texts, seed) for seed in (1, 2)]
                speeds[name], chosen = statistics.mean(speed for speed, _ in runs), runs[0][1] + runs[1][1]
            plain, total = speeds.pop("plain"), sum(chosen.values())
            most = ", ".join(f"{by or 'none'} {n} {100 * c / total:.0f}%" for (by, n), c in chosen.most_common(3))
            ratios = " ".join(f"{speed / plain:>7.2f}" for speed in speeds.values())
            print(f"{batch:>5} {standing:>6g} {plain:>9.0f} {ratios}  {most}", *plans[: given.plans], sep="\n")


if __name__ == "__main__":
    main()
