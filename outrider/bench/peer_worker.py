"""Runs another engine in a process of its own: `PYTHON peer_worker.py KIND OPTIONS`, one JSON object a line.

It is run by the Python that has the engine, which need not have this package: only the standard library and the
engine are imported. First it writes {"ready": {...}} or {"error": TEXT}; then for each request {"row", "prompt",
"max_tokens"} an answer {"tokens", "seconds", "first"}. Greedy, one sequence, nothing kept between requests.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from typing import Any

PROMPT_LOOKUP_TOKENS = 10
"""Draft tokens of prompt lookups, the default of Transformers' documentation and of llama-cpp-python."""


class TransformersPeer:
    """Rows: generate, prompt lookup, assisted (where a draft model is given)."""

    def __init__(self, folder: str, dtype: str, device: str, threads: int, draft: str = "", gguf: str = "") -> None:
        torch: Any = import_module("torch")
        transformers: Any = import_module("transformers")
        if threads:
            torch.set_num_threads(threads)
        transformers.utils.logging.set_verbosity_error()
        self.torch, self.device = torch, device
        more = {"gguf_file": gguf} if gguf else {}
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(folder, dtype=getattr(torch, dtype), **more).to(device).eval()
        self.draft = load(draft, dtype=getattr(torch, dtype)).to(device).eval() if draft else None
        own = self.model.generation_config
        self.config = transformers.GenerationConfig(
            do_sample=False, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id or 0
        )
        self.about = {"version": transformers.__version__, "format": dtype}

    def answer(self, row: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        clock = _Clock()
        more: dict[str, Any] = {}
        if row == "assisted":
            more["assistant_model"] = self.draft
        elif row == "prompt lookup":
            more["prompt_lookup_num_tokens"] = PROMPT_LOOKUP_TOKENS
        ids = self.torch.tensor([prompt], device=self.device)
        with self.torch.inference_mode():
            began = time.perf_counter()
            out = self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                generation_config=self.config,
                max_new_tokens=max_tokens,
                streamer=clock,
                **more,
            )
            tokens = out[0].tolist()[len(prompt) :]
            seconds = time.perf_counter() - began
        return {"tokens": tokens, "seconds": seconds, "first": clock.first - began}


class _Clock:
    """A streamer of Transformers that notes when the first tokens after the prompt came."""

    def __init__(self) -> None:
        self.calls, self.first = 0, 0.0

    def put(self, value: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            self.first = time.perf_counter()

    def end(self) -> None:
        pass


class LlamaCppPeer:
    """llama.cpp through llama-cpp-python. Rows: generate, prompt lookup."""

    def __init__(self, gguf: str, context: int, threads: int) -> None:
        llama_cpp: Any = import_module("llama_cpp")
        speculative: Any = import_module("llama_cpp.llama_speculative")
        threads = threads or os.cpu_count() or 1
        given = {"model_path": gguf, "n_ctx": context, "n_threads": threads, "n_threads_batch": threads}
        given |= {"n_gpu_layers": -1, "verbose": False}
        lookup = speculative.LlamaPromptLookupDecoding(num_pred_tokens=PROMPT_LOOKUP_TOKENS)
        self.models = {
            "generate": llama_cpp.Llama(**given),
            "prompt lookup": llama_cpp.Llama(**given, draft_model=lookup),
        }
        self.about = {"version": llama_cpp.__version__, "format": os.path.basename(gguf)}

    def answer(self, row: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        model = self.models[row]
        model.reset()
        tokens: list[int] = []
        first, began = 0.0, time.perf_counter()
        for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0):
            first = first or time.perf_counter()
            tokens.append(token)
            if len(tokens) >= max_tokens or token == model.token_eos():
                break
        seconds = time.perf_counter() - began
        return {"tokens": tokens, "seconds": seconds, "first": first - began}


class VllmPeer:
    """vLLM's offline interface. One row: prompt lookup where `lookup` is set, else generate."""

    def __init__(self, folder: str, dtype: str, context: int, lookup: bool) -> None:
        vllm: Any = import_module("vllm")
        more: dict[str, Any] = {}
        if lookup:
            more["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": PROMPT_LOOKUP_TOKENS,
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 1,
            }
        self.vllm = vllm
        self.model = vllm.LLM(
            model=folder, dtype=dtype, max_model_len=context, enable_prefix_caching=False, max_num_seqs=1, **more
        )
        self.about = {"version": vllm.__version__, "format": dtype}

    def answer(self, row: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """`first` is None: this interface does not tell the time of the first token."""
        params = self.vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens)
        began = time.perf_counter()
        (result,) = self.model.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return {"tokens": list(result.outputs[0].token_ids), "seconds": time.perf_counter() - began, "first": None}


PEERS = {"transformers": TransformersPeer, "llama.cpp": LlamaCppPeer, "vllm": VllmPeer}


def main(kind: str, options: str) -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [each for each in sys.path if os.path.abspath(each) != here]  # its files are named like libraries
    out = os.fdopen(os.dup(1), "w")  # engines print to stdout: that goes to stderr instead
    os.dup2(2, 1)

    def write(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    try:
        peer = PEERS[kind](**json.loads(options))
        write({"ready": peer.about})
        for line in sys.stdin:
            write(peer.answer(**json.loads(line)))
    except Exception as error:
        write({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
