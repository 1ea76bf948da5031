"""From OpenAI's `tools` and `tool_choice` to a grammar of tool calls, written as the model was trained to write them.

hermes       `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`, once or more (Qwen2.5, Hermes, SmolLM2)
llama3_json  the whole answer is `{"name": ..., "parameters": {...}}`
json         the whole answer is `{"name": ..., "arguments": {...}}`: for models that were taught no format
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

from outrider.core.errors import RequestError
from outrider.grammar.compile import compile_constraint, vocabulary_of
from outrider.grammar.matcher import GrammarConstraint
from outrider.grammar.spec import GrammarSpec

ToolFormat = Literal["hermes", "llama3_json", "json"]
ToolMode = Literal["none", "auto", "required", "named"]

MAX_TOOLS = 128
OPEN, CLOSE = "<tool_call>", "</tool_call>"
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as templates write them
_ARGUMENTS = {"hermes": "arguments", "llama3_json": "parameters", "json": "arguments"}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments: an object."""


def tool_format(template: str) -> ToolFormat:
    """How a model writes tool calls, going by the text of its chat template."""
    if OPEN in template:
        return "hermes"
    if "<|start_header_id|>" in template and "parameters" in template:
        return "llama3_json"
    return "json"


def tool_constraint(
    tools: Seq[Mapping[str, Any]], choice: Any, tokenizer: Any, *, parallel: bool = True
) -> tuple[GrammarConstraint | None, ToolFormat]:
    """What an answer may be, given these tools, and how its calls are written; None: anything (`none`).

    auto: text, or calls (hermes: text, then calls). required: at least one call. A named
    function: one call of it. `parallel` allows more than one call, where the format has it.
    Arguments are held to the function's schema. RequestError says what is wrong with the tools.
    """
    known = read_tools(tools)
    form = tool_format(tokenizer.template_text(tools=True))
    mode, wanted = read_tool_choice(choice, known)
    if mode == "none":
        return None, form
    vocabulary = vocabulary_of(tokenizer)
    marks = {mark: mark if vocabulary.is_special(mark) else _quoted(mark) for mark in (OPEN, CLOSE)}
    several = parallel and mode != "named"
    source = tool_grammar(wanted, form, free=mode == "auto", parallel=several, marks=marks)
    return compile_constraint(GrammarSpec.lark(source), tokenizer), form


def read_tools(tools: Seq[Mapping[str, Any]]) -> list[Tool]:
    """OpenAI's list of tools, checked."""
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Seq) or not 1 <= len(tools) <= MAX_TOOLS:
        raise RequestError(f"tools must be a list of 1 to {MAX_TOOLS} functions")
    known = [_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    names = [tool.name for tool in known]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestError(f"two tools are called {twice!r}; give each a name of its own")
    return known


def read_tool_choice(choice: Any, tools: Seq[Tool]) -> tuple[ToolMode, list[Tool]]:
    """How free the model is, and which tools it may call."""
    if choice is None or choice == "auto":
        return "auto", list(tools)
    if choice in ("none", "required"):
        return choice, list(tools)
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    named = [tool for tool in tools if tool.name == name]
    if not named:
        known = ", ".join(tool.name for tool in tools)
        raise RequestError(
            'tool_choice must be none, auto, required or {"type": "function", "function": {"name": NAME}} '
            f"with one of these names: {known}"
        )
    return "named", named


def tools_prompt(tools: Seq[Mapping[str, Any]], form: ToolFormat) -> str:
    """What to tell a model of its tools, for a system message, where its chat template does not mention them."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    call = _head("NAME", _ARGUMENTS[form]) + "{...}}"
    call = f"{OPEN}\n{call}\n{CLOSE}" if form == "hermes" else call
    return f"You may call these functions:\n{listed}\nTo call one, answer with:\n{call}"


def tool_grammar(
    tools: Seq[Tool], form: ToolFormat, *, free: bool, parallel: bool = True, marks: Mapping[str, str] | None = None
) -> str:
    """The Lark grammar. `free`: plain text is an answer too. `marks` spell OPEN and CLOSE where they are tokens."""
    marks = marks or {mark: _quoted(mark) for mark in (OPEN, CLOSE)}
    key = _ARGUMENTS[form]
    bodies = [f"{_quoted(_head(tool.name, key))} args_{i} {_quoted('}')}" for i, tool in enumerate(tools)]
    rules = [f"args_{i}: %json {_schema(tool)}" for i, tool in enumerate(tools)]
    rules.append("body: " + " | ".join(bodies))
    if form == "hermes":
        rules.append(f'rest: "\\n" body "\\n" {marks[CLOSE]}')
        more = f' ("\\n" {marks[OPEN]} rest)*' if parallel else ""
        rules.append(f"start: TEXT | before rest{more}" if free else f"start: {marks[OPEN]} rest{more}")
        if free:  # the mark counts however it is spelled; lazy: with its last letter the text is over
            spelled = f"TEXT {marks[OPEN]} | " if marks[OPEN] == OPEN else ""
            rules += [f"before: {spelled}spelled", f"spelled[lazy]: TEXT {_quoted(OPEN)}", r"TEXT: /(.|\n)*/"]
    else:  # an answer that begins with a brace is a call, any other is text
        rules.append("start: TEXT | body" if free else "start: body")
        rules += [r"TEXT: /([^{](.|\n)*)?/"] if free else []
    return "\n".join(["%llguidance {}", *rules])


def _read_tool(tool: Any, where: str) -> Tool:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping):
        raise RequestError(f'{where} must be {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}')
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(f"{where}: a name has 1 to 64 letters, digits, _ or -; got {name!r:.80}")
    schema = {} if schema is None else schema
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise RequestError(f"{where}: parameters must be a JSON schema of type object")
    try:
        GrammarSpec.json_schema(schema)
    except RequestError as error:
        raise RequestError(f"{where} ({name}): {error}") from error
    return Tool(name, schema)


def _head(name: str, key: str) -> str:
    return f'{{"name": "{name}", "{key}": '


def _schema(tool: Tool) -> str:
    bare = {"properties": {}, "additionalProperties": False} if not tool.parameters else {}
    return json.dumps({"type": "object", **bare, **tool.parameters, "x-guidance": _ONE_LINE})


def _quoted(text: str) -> str:
    return json.dumps(text)
