"""Messages for wrong command lines, with the nearest word that would work."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from difflib import get_close_matches
from typing import Any

import typer

from outrider.core.errors import ConfigError, ModelError, OutriderError, RequestError

# The base class of click's usage errors. By its version, typer contains click or depends on it.
UsageError: type[Exception] = typer.BadParameter.__mro__[2]

_MODEL, _COUNT, _METHOD = "--drafter draft-model:model={}", "--drafter NAME:k={}", "--drafter {}"
OTHER_ENGINES = {
    "--draft-model": _MODEL,
    "--model-draft": _MODEL,
    "-md": _MODEL,
    "--spec-draft-model": _MODEL,
    "--speculative-model": _MODEL,
    "--speculative-draft-model-path": _MODEL,
    "--assistant-model": _MODEL,
    "--num-speculative-tokens": _COUNT,
    "--num-draft-tokens": _COUNT,
    "--speculative-num-draft-tokens": _COUNT,
    "--speculative-num-steps": _COUNT,
    "--spec-draft-n-max": _COUNT,
    "--draft": _COUNT,
    "--draft-max": _COUNT,
    "--draft-n": _COUNT,
    "--spec-type": _METHOD,
    "--speculative-algorithm": _METHOD,
    "--speculative-method": _METHOD,
    "--n-predict": "--max-tokens {}",
    "--max-new-tokens": "--max-tokens {}",
    "--temp": "--temperature {}",
    "--typical": "--typical-p {}",
    "--repeat-penalty": "--repetition-penalty {}",
    "--ctx-size": "--context {}",
    "--max-model-len": "--context {}",
    "--max-num-seqs": "--max-batch {}",
    "-m": "--model {}",
    "-p": "--prompt {}",
    "-f": "--file {}",
}
"""Options of other engines, and their equivalents here."""


def exit_code(error: OutriderError) -> int:
    """The exit code for an error: 2 for bad input, 1 for a failure at run time."""
    return 2 if isinstance(error, ConfigError | RequestError) and not isinstance(error, ModelError) else 1


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean X? `, or nothing where no known word is similar."""
    near = get_close_matches(word, list(known), n=1)
    return f"did you mean {near[0]}? " if near else ""


def usage_message(error: Any, given: Seq[str]) -> str:
    """One line for an error of click: what is wrong in the given words, and what would work."""
    context = getattr(error, "ctx", None)
    program = context.command_path if context else " ".join(["outrider", *given[:1]])
    unknown = getattr(error, "option_name", None) if type(error).__name__ == "NoSuchOption" else None
    if unknown is not None:
        real = [name for param in context.command.params for name in param.opts] if context else []
        hint = _other_engine_hint(given, real) or did_you_mean(unknown, [*real, "--help"])
        return f"no such option: {unknown}; {hint}see `{program} --help`"
    message = error.format_message().strip().rstrip(".")
    verbs = getattr(context.command, "commands", None) if context else None
    if message.startswith("No such command") and verbs:
        word = next((word for word in given if not word.startswith("-")), "")
        return f"no such command: {word}; {did_you_mean(word, verbs)}see `{program} --help`"
    if not message:  # a group without a command, whose help click has printed already
        return f"name one of its commands; see `{program} --help`"
    return f"{message[:1].lower()}{message[1:]}; see `{program} --help`"


def _other_engine_hint(given: Seq[str], real: list[str]) -> str:
    """A hint for the first given option that another engine has and this command names differently."""
    for i, word in enumerate(given):
        name, equals, value = word.partition("=")
        hint = OTHER_ENGINES.get(name)
        if hint is None or hint.split()[0] not in real:
            continue
        if not equals and i + 1 < len(given) and not given[i + 1].startswith("-"):
            value = given[i + 1]
        return f"did you mean {hint.format(value or 'X')}? "
    return ""
