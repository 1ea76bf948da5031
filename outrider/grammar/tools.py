"""From OpenAI's `tools` and `tool_choice` to a grammar of tool calls, in the format the model was trained on.

hermes       `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`, once or more (Qwen2.5, Hermes, SmolLM2)
llama3_json  the whole text is `{"name": ..., "parameters": {...}}`
json         the whole text is `{"name": ..., "arguments": {...}}`: for models trained on no format
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, Literal

from outrider.core.errors import RequestError
from outrider.grammar.compile import compile_constraint, lark_rule, vocabulary_of
from outrider.grammar.matcher import GrammarMatcher
from outrider.grammar.schema import nest_schema, rewrite_schema
from outrider.grammar.spec import GrammarSpec

ToolFormat = Literal["hermes", "llama3_json", "json"]
ToolMode = Literal["none", "auto", "required", "named"]

MAX_TOOLS = 128
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as templates write them
_ARGUMENTS_KEYS = {"hermes": "arguments", "llama3_json": "parameters", "json": "arguments"}


@dataclass(frozen=True, slots=True)
class ToolFunction:
    """A function the model may call."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments: an object."""


def tool_format(template: str) -> ToolFormat:
    """The format of a model's tool calls, by the text of its chat template."""
    if CALL_OPEN in template:
        return "hermes"
    if "<|start_header_id|>" in template and "parameters" in template:
        return "llama3_json"
    return "json"


def tool_constraint(
    tools: Seq[Mapping[str, Any]],
    choice: Any,
    tokenizer: Any,
    *,
    parallel: bool = True,
    content: GrammarSpec | None = None,
    salt: str = "",
) -> tuple[GrammarMatcher | None, ToolFormat]:
    """The constraint of a request with these tools, None where any text is allowed, and the format of its calls.

    auto: text, or calls (hermes: text, then calls). required: at least one call. A named
    function: one call of it. `parallel` allows more than one call, where the format has it.
    Arguments must match the function's schema. `content`: what an output without a call must match.
    Raises RequestError where the tools are wrong, and as `compile_constraint` does.
    """
    known = read_tools(tools)
    form = tool_format(tokenizer.template_text(tools=True))
    mode, wanted = read_tool_choice(choice, known)
    if mode == "none":
        return compile_constraint(content, tokenizer, salt) if content else None, form
    vocabulary = vocabulary_of(tokenizer)
    marks = {mark: mark if vocabulary.is_special(mark) else _quote(mark) for mark in (CALL_OPEN, CALL_CLOSE)}
    content = content if mode == "auto" else None
    several = parallel and mode != "named"
    source = tool_grammar(wanted, form, free=mode == "auto", parallel=several, marks=marks, content=content)
    parts = (*(f"tool {tool.name}" for tool in wanted), *(["response_format"] if content else []))
    return compile_constraint(GrammarSpec.lark(source, parts), tokenizer, salt), form


def read_tools(tools: Seq[Mapping[str, Any]]) -> list[ToolFunction]:
    """The functions in OpenAI's list of tools, validated."""
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Seq) or not 1 <= len(tools) <= MAX_TOOLS:
        raise RequestError(f"tools must be a list of 1 to {MAX_TOOLS} functions")
    known = [_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    names = [tool.name for tool in known]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestError(f"two tools are called {twice!r}; give each a name of its own")
    return known


def read_tool_choice(choice: Any, tools: Seq[ToolFunction]) -> tuple[ToolMode, list[ToolFunction]]:
    """The mode, and the functions that may be called."""
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
    """A system message that lists the tools, for models whose chat template does not."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    call = _call_head("NAME", _ARGUMENTS_KEYS[form]) + "{...}}"
    call = f"{CALL_OPEN}\n{call}\n{CALL_CLOSE}" if form == "hermes" else call
    return f"You may call these functions:\n{listed}\nTo call one, answer with:\n{call}"


def tool_grammar(
    tools: Seq[ToolFunction],
    form: ToolFormat,
    *,
    free: bool,
    parallel: bool = True,
    marks: Mapping[str, str] | None = None,
    content: GrammarSpec | None = None,
) -> str:
    """The Lark grammar. From its second line on, a rule for each tool, and then one for the content.

    `free`: plain text is allowed too; only what matches `content`, where given, with JSON on one line: llguidance would
    allow whitespace before it otherwise. `marks`: how each mark is written in Lark, quoted text by default.
    """
    marks = marks or {mark: _quote(mark) for mark in (CALL_OPEN, CALL_CLOSE)}
    key, hermes = _ARGUMENTS_KEYS[form], form == "hermes"
    if content and not hermes:
        rules = [f"call_{i}: {_call_rule(tool, key)}" for i, tool in enumerate(tools)]
        bodies = [f"call_{i}" for i in range(len(tools))]
    else:
        rules = [f"args_{i}: %json {json.dumps(_arguments_schema(tool))}" for i, tool in enumerate(tools)]
        bodies = [f"{_quote(_call_head(tool.name, key))} args_{i} {_quote('}')}" for i, tool in enumerate(tools)]
    rules += [f"content: {lark_rule(replace(content, whitespace='line'))}"] if content else []
    rules.append("body: " + " | ".join(bodies))
    rules += (
        _hermes_rules(marks, parallel, free, bool(content)) if form == "hermes" else _json_rules(free, bool(content))
    )
    return "\n".join(["%llguidance {}", *rules])


def _hermes_rules(marks: Mapping[str, str], parallel: bool, free: bool, content: bool) -> list[str]:
    opening = marks[CALL_OPEN]
    more = f' ("\\n" {opening} rest)*' if parallel else ""
    rules = [f'rest: "\\n" body "\\n" {marks[CALL_CLOSE]}']
    if content or not free:
        return [*rules, ("start: content | " if content else "start: ") + f"{opening} rest{more}"]
    # the mark counts as a token and as text; lazy: the text ends with its last letter
    spelled = f"TEXT {opening} | " if opening == CALL_OPEN else ""
    rules += [f"start: TEXT | before rest{more}", f"before: {spelled}spelled"]
    return [*rules, f"spelled[lazy]: TEXT {_quote(CALL_OPEN)}", r"TEXT: /(.|\n)*/"]


def _json_rules(free: bool, content: bool) -> list[str]:
    if content or not free:
        return ["start: content | body" if content else "start: body"]
    return ["start: TEXT | body", r"TEXT: /([^{](.|\n)*)?/"]  # a text that begins with a brace is a call


def _read_tool(tool: Any, where: str) -> ToolFunction:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping):
        raise RequestError(f'{where} must be {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}')
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _FUNCTION_NAME.fullmatch(name):
        raise RequestError(f"{where}: a name has 1 to 64 letters, digits, _ or -; got {name!r:.80}")
    schema = {} if schema is None else schema
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise RequestError(f"{where}: parameters must be a JSON schema of type object")
    try:
        GrammarSpec.json_schema(schema)
    except RequestError as error:
        raise RequestError(f"{where} ({name}): {error}") from error
    return ToolFunction(name, rewrite_schema(_closed(schema, function.get("strict")), relaxed=True))


_OPENING = {"additionalProperties", "patternProperties", "propertyNames", "allOf", "anyOf", "oneOf", "$ref"}


def _closed(schema: Mapping[str, Any], strict: Any) -> Mapping[str, Any]:
    """The schema with only the listed parameters allowed, where it says nothing about others.

    JSON schema allows them then, but no function takes them, and a model may go on to invent names.
    """
    says_nothing = "properties" in schema and _OPENING.isdisjoint(schema)
    return {**schema, "additionalProperties": False} if says_nothing and strict is not False else schema


def _call_head(name: str, key: str) -> str:
    return f'{{"name": "{name}", "{key}": '


def _arguments_schema(tool: ToolFunction) -> dict[str, Any]:
    bare = {"properties": {}, "additionalProperties": False} if not tool.parameters else {}
    return {"type": "object", **bare, **tool.parameters, "x-guidance": _ONE_LINE}


def _call_rule(tool: ToolFunction, key: str) -> str:
    """A whole call as one rule of JSON: beside other JSON, its beginning must not be a lexeme of its own."""
    arguments = nest_schema(_arguments_schema(tool), f"/properties/{key}")
    del arguments["x-guidance"]
    properties = {"name": {"const": tool.name}, key: arguments}
    call = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return lark_rule(GrammarSpec("json_schema", json.dumps(call), "line"))


def _quote(text: str) -> str:
    return json.dumps(text)
