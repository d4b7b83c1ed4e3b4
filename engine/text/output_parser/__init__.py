"""Parses a model's text into content, reasoning and tool calls while it comes, by family; and
writes the grammar of an output that must call a tool.

Knows no torch, no wire format and no tenant. `OutputFormat` is the entry; its parsers return
`Delta`s.
"""

from __future__ import annotations

from engine.text.output_parser.grammars.forced_calls import Tool
from engine.text.output_parser.output_format import OutputFormat
from engine.text.output_parser.parser import OutputParser
from engine.text.output_parser.reading.deltas import (
    ArgumentsDelta,
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallStart,
)
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
