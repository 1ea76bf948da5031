"""What an answer must look like: `response_format`, `tools` and `tool_choice`, compiled into a constraint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.core.sequence import Constraint
from outrider.grammar import ToolFormat, compile_constraint, read_response_format, tool_constraint
from outrider.server.problems import Problem
from outrider.server.schema import ChatRequest, ToolChoice


@dataclass(frozen=True, slots=True)
class Structure:
    """What holds an answer to its form, and how tool calls are written in it."""

    constraint: Constraint | None = None
    form: ToolFormat | None = None
    """None: an answer holds no tool calls."""


FREE = Structure()
OWN_FIELDS = ("json_schema", "regex", "grammar", "choice")


def asks_for_structure(body: ChatRequest) -> bool:
    return bool(body.tools) or body.tool_choice not in (None, "none", "auto") or body.response_format is not None


def structure_of(body: ChatRequest, tokenizer: Any) -> Structure:
    """Compiled within the grammar package's own time limit. Not for an event loop. RequestError or Problem."""
    wanted = body.response_format.model_dump(by_alias=True, exclude_none=True) if body.response_format else None
    astray = [name for name in OWN_FIELDS if wanted and name in wanted and name != wanted["type"]]
    if wanted and astray:
        message = f"response_format of type {wanted['type']} has no {astray[0]}; its type would have to be {astray[0]}"
        raise Problem(400, message, param="response_format", code="invalid_value")
    spec = read_response_format(wanted)
    if not body.tools and body.tool_choice not in (None, "none", "auto"):
        raise Problem(400, "tool_choice asks for a call, and there are no tools", param="tool_choice")
    if not body.tools or body.tool_choice == "none":
        return Structure(compile_constraint(spec, tokenizer)) if spec is not None else FREE
    if spec is not None:
        raise Problem(
            400, "response_format and tools each say what the answer is; send one, or tool_choice: none", param="tools"
        )
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
    choice = body.tool_choice.model_dump() if isinstance(body.tool_choice, ToolChoice) else body.tool_choice
    constraint, form = tool_constraint(tools, choice, tokenizer, parallel=body.parallel_tool_calls is not False)
    return Structure(constraint, form)
