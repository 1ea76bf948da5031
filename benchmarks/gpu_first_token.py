"""Run by gpu.py in a process of its own: the time from start to the first token, and until graphs are captured.

    python benchmarks/gpu_first_token.py TARGET DRAFT DEVICE PROMPT_TOKENS CONTEXT BEGAN

Seconds are counted from BEGAN, the time (as of `time.time`) at which the process was started.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    target, draft, device, prompt, context, began = sys.argv[1:]
    from outrider import LLM, SamplingParams

    def since() -> float:
        return time.time() - float(began)

    imported = since()
    options = {"device": device, "context": int(context), "cache_tokens": 8 * int(context)}
    llm = LLM(target, drafter=f"draft-model:model={draft},k=5", **options)
    loaded, first = since(), 0.0
    ids = [257 + i % (llm.loaded.target.vocab_size - 257) for i in range(int(prompt))]
    for event in llm.stream(ids, SamplingParams(max_tokens=24, ignore_eos=True)):
        first = first or (since() if event.tokens else 0.0)
    times = {"imported": imported, "loaded": loaded, "first_token": first, "captured": since()}
    print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
