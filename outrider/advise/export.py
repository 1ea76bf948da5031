"""A choice of drafter as other engines take it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from outrider.models.heads.checkpoint import kind_of
from outrider.models.heads.files import open_head

LOOKUP_MATCH = 4
"""Tokens that an n-gram lookup of another engine matches at most."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A drafter and a length, for a target."""

    target: str
    drafter: str
    """As `--drafter` takes it."""
    length: int
    """Tokens of a draft."""
    shipped: str = ""
    """Folder of the head that is shipped for the target, which a drafter takes that names none; "" for none."""

    @property
    def name(self) -> str:
        return self.drafter.partition(":")[0]

    def option(self, name: str) -> str:
        """One of the drafter's options, "" where it is not given."""
        options = dict(part.split("=", 1) for part in self.drafter.partition(":")[2].split(",") if "=" in part)
        return options.get(name, "")

    @property
    def model(self) -> str:
        return self.option("model") or (self.shipped if self.name in ("eagle", "block") else "")

    @property
    def tree(self) -> int:
        return int(self.option("tree") or 0)


def serve_command(choice: Choice) -> str:
    """For this package. The controller, which is on by default, drafts less where less pays."""
    return f"outrider serve {choice.target} --drafter {choice.drafter}"


def vllm_command(choice: Choice) -> str | None:
    """None where vLLM has no such method."""
    config = vllm_config(choice)
    return None if config is None else f"vllm serve {choice.target} --speculative-config '{json.dumps(config)}'"


def vllm_config(choice: Choice) -> dict[str, object] | None:
    """vLLM's `speculative_config`. It drafts chains: of a tree it gets the depth."""
    made: dict[str, Callable[[], dict[str, object]]] = {
        "suffix": lambda: {"method": "suffix"},
        "prompt-lookup": lambda: {"method": "ngram", "prompt_lookup_max": LOOKUP_MATCH, "prompt_lookup_min": 2},
        "draft-model": lambda: {"method": "draft_model", "model": choice.model},
        "eagle": lambda: {"method": _head_kind(choice.model), "model": choice.model},
        "medusa": lambda: {"method": "medusa", "model": choice.model},
        "block": lambda: {"method": "dspark", "model": choice.model},
        "mtp": lambda: {"method": "mtp"},
    }
    if choice.name not in made:
        return None
    return made[choice.name]() | {"num_speculative_tokens": _chain(choice)}


def sglang_command(choice: Choice) -> str | None:
    """None where SGLang has no such algorithm."""
    names = {"prompt-lookup": "NGRAM", "draft-model": "STANDALONE", "mtp": "NEXTN", "block": "DSPARK"}
    name = names.get(choice.name)
    if choice.name == "eagle":
        name = "EAGLE3" if _head_kind(choice.model) == "eagle3" else "EAGLE"
    if name is None:
        return None
    steps = _chain(choice)
    nodes = choice.tree or steps + 1
    words = ["python -m sglang.launch_server", f"--model-path {choice.target}", f"--speculative-algorithm {name}"]
    words += [f"--speculative-draft-model-path {choice.model}"] if choice.model else []
    if name != "NGRAM":
        words += [f"--speculative-num-steps {steps}", f"--speculative-eagle-topk {4 if choice.tree else 1}"]
    return " ".join([*words, f"--speculative-num-draft-tokens {nodes}"])


def tensorrt_yaml(choice: Choice) -> str | None:
    """TensorRT-LLM's `--extra_llm_api_options` file; None where it has no such method."""
    kinds = {"prompt-lookup": "NGram", "draft-model": "DraftTarget", "eagle": "Eagle", "medusa": "Medusa", "mtp": "MTP"}
    kind = kinds.get(choice.name)
    if kind is None:
        return None
    lines = ["speculative_config:", f"  decoding_type: {kind}"]
    if kind == "MTP":
        return "\n".join([*lines, f"  num_nextn_predict_layers: {_chain(choice)}"]) + "\n"
    lines += [f"  max_draft_len: {_chain(choice)}"]
    lines += [f"  speculative_model_dir: {json.dumps(choice.model)}"] if choice.model else []
    lines += [f"  max_matching_ngram_size: {LOOKUP_MATCH}"] if kind == "NGram" else []
    return "\n".join(lines) + "\n"


def _chain(choice: Choice) -> int:
    """Tokens of a chain. A tree of n nodes is about as deep as a chain of n / 4 tokens."""
    return max(1, choice.tree // 4) if choice.tree else choice.length


def _head_kind(model: str) -> str:
    """eagle or eagle3, as the checkpoint says."""
    return kind_of(open_head(model))
