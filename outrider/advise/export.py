"""Writes a choice of drafter for other engines: a configuration, a command, and notes on what differs there."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from outrider.core.errors import ConfigError
from outrider.models.heads.checkpoint import kind_of, parse_head_config
from outrider.models.heads.files import open_head
from outrider.models.heads.vllm import head_for_vllm

LOOKUP_MATCH = 4
"""Max tokens that an n-gram lookup of another engine matches, where the choice does not say."""
TREE_TOP_K = 4
"""`speculative-eagle-topk` for trees in SGLang: the children of a node."""
SEEDED = (
    "mode seeded has no counterpart: an answer to a request with a seed is another text there, of the same distribution"
)
FIXED = "Outrider's controller chooses a length in every round; here it is {length}, always"

Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Choice:
    """A drafter and a draft length, chosen for a target."""

    target: str
    drafter: str
    """As `--drafter` takes it."""
    length: int
    """Tokens of a draft."""
    shipped: str = ""
    """Folder of the head that is shipped for the target, used where the drafter names none; "" for none."""
    adaptive: bool = False
    """Whether Outrider's controller is to choose each draft's length; `length` is then the best fixed one."""
    draft: str = ""
    """Where the other engine finds the draft model or head; "": at `model`, as on this machine."""

    @property
    def name(self) -> str:
        return self.drafter.partition(":")[0]

    def option(self, name: str) -> str:
        """The value of one of the drafter's options; "" where it is not given."""
        options = dict(part.split("=", 1) for part in self.drafter.partition(":")[2].split(",") if "=" in part)
        return options.get(name, "")

    @property
    def model(self) -> str:
        return self.option("model") or (self.shipped if self.name in ("eagle", "block") else "")

    @property
    def tree(self) -> int:
        return int(self.option("tree") or 0)

    @property
    def chain(self) -> int:
        """Tokens of a chain in place of the draft: `length`, or for a tree of n nodes its typical depth, n / 4."""
        return max(1, self.tree // 4) if self.tree else self.length

    @property
    def match(self) -> int:
        """Max tokens that an n-gram lookup matches."""
        return int(self.option("max_match") or LOOKUP_MATCH)

    @property
    def head(self) -> str:
        """The kind of head, read from its checkpoint: eagle, eagle3, medusa, mtp, dflash or dspark."""
        files = open_head(self.model)
        kind = kind_of(files)
        return kind if kind != "block" else "dspark" if parse_head_config(files).markov_rank else "dflash"


@dataclass(frozen=True, slots=True)
class Export:
    """A choice, written for one engine."""

    engine: str
    arguments: Arguments
    """The engine's options for speculation, by its own names; {}: it decodes plainly."""
    command: str
    config: str
    """Text of the configuration file that holds the arguments; "" where the command holds them all."""
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Engine:
    """How a choice is written for one engine."""

    arguments: Callable[[Choice], Arguments]
    """The engine's options for a choice. ConfigError where it has no counterpart of the drafter."""
    command: Callable[[str, Arguments, str], list[str]]
    """The words of the command, from the target, the arguments, and the file that holds the arguments ("" for none)."""
    config: Callable[[Arguments], str]
    needs_file: bool = False


def serve_command(choice: Choice) -> str:
    """The command for this package. It names no length: the controller, on by default, chooses it in each round."""
    return f"outrider serve {choice.target} --drafter {choice.drafter}"


def export_to(name: str, choice: Choice, file: str = "") -> Export:
    """The choice as the named engine takes it. ConfigError where the engine has no such drafter.

    file: where the configuration is to be written; "": the command holds it, unless the engine needs a file.
    """
    engine = ENGINES[name]
    if "+" in choice.drafter:
        raise ConfigError(
            f"{choice.drafter!r} mixes drafters, and {name} takes one; export one of them: --drafter NAME"
        )
    arguments = {} if choice.name == "none" else engine.arguments(choice)
    file = (file or "config.yaml") if arguments and (file or engine.needs_file) else ""
    config = engine.config(arguments) if file else ""
    command = shlex.join(engine.command(choice.target, arguments, file if config else ""))
    return Export(name, arguments, command, config, _notes(name, choice) if arguments else ())


def with_vllm_head(choice: Choice) -> Choice:
    """The choice with its head in the form that vLLM reads (`head_for_vllm`); unchanged where no head is given here."""
    if choice.draft or choice.name not in ("eagle", "block") or not choice.model:
        return choice
    return replace(choice, draft=str(head_for_vllm(choice.model, choice.target)))


def vllm_config(choice: Choice) -> Arguments | None:
    """vLLM's `speculative_config`; None where vLLM has no such method. vLLM drafts chains: a tree becomes a chain."""
    made: dict[str, Callable[[], Arguments]] = {
        "suffix": lambda: {"method": "suffix"} | _suffix_options(choice),
        "prompt-lookup": lambda: {"method": "ngram", "prompt_lookup_max": choice.match, "prompt_lookup_min": 2},
        "draft-model": lambda: {"method": "draft_model", "model": _draft(choice)},
        "cross-model": lambda: {"method": "draft_model", "model": _draft(choice), "use_heterogeneous_vocab": True},
        "eagle": lambda: {"method": choice.head, "model": _draft(choice)},
        "medusa": lambda: {"method": "medusa", "model": _draft(choice)},
        "block": lambda: {"method": choice.head, "model": _draft(choice)},
        "mtp": lambda: {"method": "mtp"},
    }
    if choice.name not in made:
        return None
    return made[choice.name]() | {"num_speculative_tokens": choice.chain}


def _vllm(choice: Choice) -> Arguments:
    config = vllm_config(choice)
    return (
        _refuse(
            "vLLM", choice, "suffix, ngram (prompt-lookup), draft_model, eagle, eagle3, medusa, dflash, dspark, mtp"
        )
        if config is None
        else config
    )


def _suffix_options(choice: Choice) -> Arguments:
    names = {
        "factor": "suffix_decoding_max_spec_factor",
        "min_prob": "suffix_decoding_min_token_prob",
        "max_depth": "suffix_decoding_max_tree_depth",
        "cached_requests": "suffix_decoding_max_cached_requests",
    }
    given = {theirs: choice.option(ours) for ours, theirs in names.items()}
    return {name: json.loads(value) for name, value in given.items() if value and value != "auto"}


def _sglang(choice: Choice) -> Arguments:
    chain = choice.chain
    steps = {"speculative-num-steps": chain, "speculative-eagle-topk": 1, "speculative-num-draft-tokens": chain + 1}
    if choice.tree:
        steps |= {"speculative-eagle-topk": TREE_TOP_K, "speculative-num-draft-tokens": choice.tree}
    if choice.name == "prompt-lookup":
        return {"speculative-algorithm": "NGRAM", "speculative-num-draft-tokens": chain + 1}
    if choice.name == "mtp":
        return {"speculative-algorithm": "NEXTN"} | steps
    if choice.name in ("eagle", "draft-model"):
        name = "STANDALONE" if choice.name == "draft-model" else choice.head.upper()
        return {"speculative-algorithm": name, "speculative-draft-model-path": _draft(choice)} | steps
    if choice.name == "block":
        name = choice.head
        block = {"dflash": chain + 1, "dspark": chain}[name]  # DFlash also counts the token before the draft
        size = {f"speculative-{name}-block-size": block}
        return {"speculative-algorithm": name.upper(), "speculative-draft-model-path": _draft(choice)} | size
    return _refuse("SGLang", choice, "NGRAM (prompt-lookup), STANDALONE (draft-model), EAGLE, NEXTN, DFLASH, DSPARK")


def _tensorrt(choice: Choice) -> Arguments:
    """`speculative_config` of TensorRT-LLM's PyTorch backend, and the options that must go with it in the file."""
    plain = {"max_draft_len": choice.chain}
    if choice.name == "mtp":
        return {"speculative_config": {"decoding_type": "MTP"} | plain}
    if choice.name == "suffix":
        return {"speculative_config": {"decoding_type": "SA", "enable_global_pool": True} | plain}
    if choice.name == "prompt-lookup":
        own = {"decoding_type": "NGram", "max_matching_ngram_size": choice.match}
        return {"speculative_config": own | plain, "disable_overlap_scheduler": True}
    if choice.name == "draft-model":
        own = {"decoding_type": "Draft_Target", "speculative_model": _draft(choice)}
        return {"speculative_config": own | plain, "disable_overlap_scheduler": True}
    if choice.name in ("eagle", "block") and (kind := choice.head) in ("eagle3", "dflash"):
        own = {"decoding_type": "Eagle3" if kind == "eagle3" else "DFlash", "speculative_model": _draft(choice)}
        return {"speculative_config": own | (_dynamic_tree(choice) if choice.tree else plain)}
    return _refuse("TensorRT-LLM", choice, "SA (suffix), NGram (prompt-lookup), Draft_Target, Eagle3, DFlash, MTP")


def _dynamic_tree(choice: Choice) -> Arguments:
    depth, top_k = int(choice.option("depth") or 6), int(choice.option("top_k") or 8)
    nodes = max(depth, min(choice.tree, depth * top_k))
    tree = {"use_dynamic_tree": True, "dynamic_tree_max_topK": top_k, "max_total_draft_tokens": nodes}
    return {"max_draft_len": depth} | tree


def _llama_cpp(choice: Choice) -> Arguments:
    if not choice.target.endswith(".gguf"):
        raise ConfigError(
            f"llama.cpp reads .gguf files, and {choice.target} is none; convert it with llama.cpp's "
            "convert_hf_to_gguf.py and name the file: --target FILE.gguf"
        )
    length = {"spec-draft-n-max": choice.chain, "spec-draft-n-min": 0}
    if choice.name == "prompt-lookup":
        sizes = {"spec-ngram-simple-size-n": choice.match, "spec-ngram-simple-size-m": choice.chain}
        return {"spec-type": "ngram-simple"} | sizes
    if choice.name == "suffix":
        return {"spec-type": "ngram-mod", "spec-ngram-mod-n-min": 0, "spec-ngram-mod-n-max": choice.chain}
    if choice.name == "mtp":
        return {"spec-type": "draft-mtp"} | length
    kind = "simple" if choice.name == "draft-model" else ""
    if choice.name in ("eagle", "block"):
        kind = choice.head
    if kind not in ("simple", "eagle3", "dflash", "dspark"):
        return _refuse("llama.cpp", choice, "ngram-simple, ngram-mod, draft-model, EAGLE-3, DFlash, DSpark, MTP")
    model = _draft(choice)
    if not model.endswith(".gguf"):
        raise ConfigError(f"llama.cpp reads .gguf files, and {model} is none; convert it: --draft FILE.gguf")
    return {"spec-type": f"draft-{kind}", "model-draft": model} | length


def _draft(choice: Choice) -> str:
    found = choice.draft or choice.model
    if not found:
        raise ConfigError(f"{choice.drafter} names no model that another engine could load; name one: --draft NAME")
    return found


def _refuse(engine: str, choice: Choice, has: str) -> Arguments:
    raise ConfigError(f"{engine} has no counterpart of {choice.drafter!r}; it has {has}")


def _notes(engine: str, choice: Choice) -> tuple[str, ...]:
    notes = [SEEDED]
    notes += [FIXED.format(length=choice.chain)] if choice.adaptive else []
    if choice.option("history"):
        notes.append(f"history={choice.option('history')}: {engine} cannot load it, and begins without those answers")
    if choice.tree and engine in ("vllm", "llama.cpp"):
        notes.append(f"it drafts chains: {choice.chain} tokens in place of a tree of {choice.tree}")
    told = {
        ("vllm", "suffix"): "suffix decoding needs `pip install arctic-inference` beside vLLM",
        ("vllm", "cross-model"): "with two vocabularies vLLM drafts greedily, from the tokens that both have",
        ("tensorrt-llm", "suffix"): "SA matches in requests under way and as many ended ones as its pool holds",
        ("llama.cpp", "suffix"): "ngram-mod is the nearest: hashes of 24 tokens, one pool for all requests",
    }
    return (*notes, *(text for at, text in told.items() if at == (engine, choice.name)))


def _lines(values: Arguments, indent: str = "") -> str:
    """The values as YAML, one key a line; values that are not mappings are written as JSON, which is valid YAML."""
    found = ""
    for key, value in values.items():
        under = f"\n{_lines(value, indent + '  ')}" if isinstance(value, dict) else f" {json.dumps(value)}\n"
        found += f"{indent}{key}:{under}"
    return found


def _flags(arguments: Arguments) -> list[str]:
    return [word for name, value in arguments.items() for word in (f"--{name}", str(value))]


def _vllm_words(target: str, arguments: Arguments, file: str) -> list[str]:
    config = ["--config", file] if file else ["--speculative-config", json.dumps(arguments)]
    return ["vllm", "serve", target, *(config if arguments else ())]


def _sglang_words(target: str, arguments: Arguments, file: str) -> list[str]:
    words = ["python", "-m", "sglang.launch_server", "--model-path", target]
    return [*words, *(["--config", file] if file else _flags(arguments))]


ENGINES: dict[str, Engine] = {
    "vllm": Engine(_vllm, _vllm_words, lambda found: _lines({"speculative-config": found})),
    "sglang": Engine(_sglang, _sglang_words, _lines),
    "tensorrt-llm": Engine(
        _tensorrt,
        lambda target, _, file: ["trtllm-serve", target, *(["--config", file] if file else ())],
        _lines,
        needs_file=True,
    ),
    "llama.cpp": Engine(
        _llama_cpp, lambda target, found, _: ["llama-server", "--model", target, *_flags(found)], lambda _: ""
    ),
}
