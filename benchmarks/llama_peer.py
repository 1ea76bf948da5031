"""llama.cpp beside us, in a Python of its own: commands come as lines of JSON on standard input, answers go out.

    python -m venv ENV
    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON" ENV/bin/pip install llama-cpp-python
    python benchmarks/cpu.py --model FILE.gguf --llama ENV/bin/python

A command names a mode (plain or lookup), a number of tokens and prompts, or the ids of a prompt to read.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

LOOKUP_TOKENS = 10


def main() -> None:
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    file, threads = sys.argv[1], int(sys.argv[2])
    options: dict[str, Any] = {"n_ctx": 2048, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
    models = {
        "plain": Llama(file, **options),
        "lookup": Llama(file, **options, draft_model=LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS)),
    }
    for line in sys.stdin:
        asked = json.loads(line)
        model = models[asked["mode"]]
        found = _read(model, asked["ids"]) if "ids" in asked else _complete(model, asked["prompts"], asked["tokens"])
        print(json.dumps(found), flush=True)


def _complete(model: Any, prompts: list[str], tokens: int) -> float:
    """Tokens per second after each first token, greedy."""
    count, seconds = 0, 0.0
    for prompt in prompts:
        model.reset()
        chunks = model.create_chat_completion(
            [{"role": "user", "content": prompt}], max_tokens=tokens, temperature=0, stream=True
        )
        times = [time.perf_counter() for chunk in chunks if chunk["choices"][0]["delta"].get("content")]
        count += len(times) - 1
        seconds += times[-1] - times[0]
    return count / seconds


def _read(model: Any, ids: list[int]) -> float:
    """Tokens of a prompt per second."""
    model.reset()
    began = time.perf_counter()
    model.eval(ids)
    return len(ids) / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
