"""Parses a model's text into content, reasoning and tool calls while it comes, by family; and
writes the grammar of an output that must call a tool.

Knows no torch, no wire format and no tenant. `OutputFormat` is the entry; its parsers return
`Delta`s.
"""
