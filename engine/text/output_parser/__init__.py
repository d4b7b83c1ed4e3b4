"""A model's text to content, reasoning and tool calls, family by family, while it comes; and what
an output has to be that must call.

Knows no torch, no wire format and no tenant. `OutputFormat` is the door, its parsers say `Delta`s:

    output_format.py > families.py > hermes, llama3, mistral, deepseek, json_calls > call_object.py
    parser.py, reasoning.py > reader.py > json_text.py, deltas.py
    offered_calls.py > forced_calls.py > writing.py, lark.py > ebnf.py
"""

from __future__ import annotations

from engine.text.output_parser.deltas import (
    ArgumentsDelta,
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallStart,
)
from engine.text.output_parser.grammars.forced_calls import Tool
from engine.text.output_parser.output_format import OutputFormat
from engine.text.output_parser.parser import OutputParser
from engine.text.output_parser.reasoning import ReasoningState
from engine.text.output_parser.registry import FamilyName, ReasoningName

__all__ = [
    "ArgumentsDelta",
    "ContentDelta",
    "Delta",
    "FamilyName",
    "OutputFormat",
    "OutputParser",
    "ReasoningDelta",
    "ReasoningName",
    "ReasoningState",
    "Tool",
    "ToolCallStart",
]
