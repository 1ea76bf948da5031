"""The acceptance rate of a draft model by mode and temperature, on real prompts.

    python benchmarks/acceptance.py --model TARGET --draft DRAFT [--k 5] [--tokens 64] [--json FILE]

Every cell completes the same prompts with the same seed. α: chance that a draft token is accepted
given that those before it were; τ: tokens per target pass. Speed is not measured.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from outrider import LLM, SamplingParams
from outrider.engine.stats import total

PROMPTS: dict[str, list[str]] = json.loads((Path(__file__).parent / "prompts.json").read_text())
CELLS = [("seeded", "block"), ("distribution", "block"), ("distribution", "token")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=4, help="of each kind")
    parser.add_argument("--quantize", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    packed = f",quantize={args.quantize}" if args.quantize in ("int4", "int8") else ""
    found = []
    for mode, rule in CELLS:
        drafter = f"draft-model:model={args.draft},k={args.k}{packed}"
        llm = LLM(args.model, drafter=drafter, mode=mode, rule=rule, quantize=args.quantize, max_batch=4, context=2048)
        for temperature in (0.0, 0.6, 1.0):
            for kind in PROMPTS:
                ids = [llm.tokenizer.encode_chat([{"role": "user", "content": p}]) for p in PROMPTS[kind]]
                params = SamplingParams(temperature=temperature, seed=11, max_tokens=args.tokens)
                tally = total(result.stats for result in llm.generate(ids[: args.prompts], params)).all
                cell = {"mode": mode, "rule": rule if mode == "distribution" else "-", "temperature": temperature}
                cell |= {"prompts": kind, "alpha": tally.alpha, "tau": tally.tau, "rounds": tally.rounds}
                found.append(cell)
                print(
                    f"{mode:13} {cell['rule']:6} T {temperature:.1f}  {kind:5} "
                    f"α {tally.alpha:.3f}  τ {tally.tau:.2f}  over {tally.rounds} rounds",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
