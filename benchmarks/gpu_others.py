"""Parts of benchmarks/gpu.py outside the pair's engine: a start from disk, Transformers, a small real model."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_frame import Bench, Row, sync

from outrider import LLM, SamplingParams
from outrider.bench.measure import measure, random_prompts
from outrider.checkpoints.demo import demo_folder
from outrider.testing.synthetic import synthetic_pair
from outrider.testing.synthetic_checkpoint import EOS, save_decoder, transformers_model

HERE = Path(__file__).parent


def start(bench: Bench) -> None:
    """A new process: imports, weights from disk, one prompt, first token, graphs captured."""
    plan, pair = bench.plan, bench.pair
    with tempfile.TemporaryDirectory(dir=plan.folder) as name:
        began = time.perf_counter()
        target, draft = pair.save(Path(name))
        saved = time.perf_counter() - began
        bench.check_time()
        command = [sys.executable, str(HERE / "gpu_first_token.py"), str(target), str(draft), str(plan.device)]
        command += [str(plan.prompt), str(plan.prompt + plan.new), str(time.time())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the process that was to start failed: {done.stderr[-2000:]}")
    times = json.loads(done.stdout.splitlines()[-1])
    parts = ", ".join(f"{key} {value:.1f}" for key, value in times.items())
    note = f"{parts}; files in the page cache; saved in {saved:.0f} s"
    bench.add(Row(section="start", name="start to first token", seconds=times["first_token"], note=note))
    bench.add(Row(section="start", name="start to graphs captured", seconds=times["captured"], note="24 tokens"))


def generate_rate(model: Any, ids: torch.Tensor, new: int, **options: Any) -> tuple[float, float]:
    """Tokens per second after the first, from the time for `new` tokens less that for one; and of the whole."""

    def seconds(tokens: int) -> float:
        sync(ids.device)
        began = time.perf_counter()
        limits = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": EOS}
        with torch.inference_mode():
            model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **limits, **options)
        sync(ids.device)
        return time.perf_counter() - began

    model.generation_config.eos_token_id = None  # no early end
    seconds(min(8, new))
    one, all_of_them = seconds(1), seconds(new)
    return (new - 1) / max(1e-9, all_of_them - one), new / all_of_them


def transformers(bench: Bench) -> None:
    """`generate` and assisted generation, eager, on the same weights in the same run."""
    plan, pair = bench.plan, bench.pair
    _ = bench.factory  # folds norms into matrices now, before the weights are shared
    model, draft = (transformers_model(d, pair.config_of(d)) for d in (pair.target, pair.draft))
    draft.generation_config.eos_token_id = None
    draft.generation_config.num_assistant_tokens = 5
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    ids = torch.tensor(bench.prompts(1, plan.prompt), device=plan.device)
    new = min(128, plan.new)
    for name, options in (("Transformers generate", {}), ("Transformers assisted", {"assistant_model": draft})):
        bench.check_time()
        rate, whole = generate_rate(model, ids, new, **options)
        row = Row(section="transformers", name=name, context=plan.prompt, tokens_per_second=rate)
        row.whole_tokens_per_second, row.note = whole, f"eager, {pair.target.dtype}, {new} new tokens"
        row.of_limit = bench.limit_ms(1, plan.prompt) * rate / 1000 if not options else None
        bench.add(row)


def small(bench: Bench) -> None:
    """A real small model where there is one, else its shape: plain decoding against Transformers."""
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    plan = bench.plan
    folder = Path(plan.model) if plan.model else demo_folder()
    kind = "bfloat16" if plan.device.type == "cuda" else "float32"
    with tempfile.TemporaryDirectory(dir=plan.folder) as scratch:
        said = f"real weights of {folder.name}" if folder else f"shape of {plan.small}, random weights"
        if folder is None:
            made = synthetic_pair(plan.small, 1, device=plan.device)
            folder = Path(scratch)
            save_decoder(made.target, made.config_json, folder)
        context, tokens = plan.prompt + plan.new + 16, 4 * (plan.prompt + plan.new)
        options: dict[str, Any] = {"device": str(plan.device), "dtype": kind, "context": context}
        llm = LLM(str(folder), drafter="none", cache_tokens=tokens, quantize="none", **options)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, kind)).to(plan.device).eval()
    prompts = random_prompts(1, plan.prompt, llm.loaded.target.vocab_size, first=EOS + 1)
    params = SamplingParams(max_tokens=plan.new, ignore_eos=True)
    found = [measure(llm.engine, prompts, params, salt=bench.salt()) for _ in range(2)][-1]
    draft, verify, rest = found.split_ms()
    bench.add(
        Row(
            section="small", name="small model, plain", context=plan.prompt, tokens_per_second=found.rate,
            whole_tokens_per_second=found.total_rate, tau=found.tau, round_ms=found.round_ms, draft_ms=draft,
            verify_ms=verify, rest_ms=rest, host_share=found.host_share, note=said,
        )
    )  # fmt: skip
    ids = torch.tensor(prompts, device=plan.device)
    rate, whole = generate_rate(model, ids, min(128, plan.new))
    row = Row(section="small", name="small model, Transformers generate", context=plan.prompt, tokens_per_second=rate)
    row.whole_tokens_per_second, row.note = whole, f"plain is {found.rate / rate:.1f} times this"
    bench.add(row)
