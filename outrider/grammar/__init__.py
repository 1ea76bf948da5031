"""Structured output: from a schema, pattern or grammar to the tokens allowed next. Built on llguidance."""

from outrider.grammar.compile import compile_constraint, prepare
from outrider.grammar.spec import GrammarSpec, read_response_format
from outrider.grammar.tool_parser import ToolParser, parse_tool_calls
from outrider.grammar.tools import ToolFormat, tool_constraint, tool_format, tools_prompt
from outrider.grammar.worker_process import CompilerUnavailableError, GrammarCostError

__all__ = [
    "CompilerUnavailableError",
    "GrammarCostError",
    "GrammarSpec",
    "ToolFormat",
    "ToolParser",
    "compile_constraint",
    "parse_tool_calls",
    "prepare",
    "read_response_format",
    "tool_constraint",
    "tool_format",
    "tools_prompt",
]
