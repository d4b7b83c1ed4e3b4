"""Reads the tools of a `Response` that the client runs, as structs and as the functions that a
model is shown: those of a namespace under its name and their own, those that take a free text as
functions of one text. What the model calls is named back.

Tools that the vendor's servers would run are no functions: they are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from engine.protocol import Grammar
from engine.text.output_parser.grammars.forced_calls import TEXT_ARGUMENT
from gateway.generate_request import OutputForm, Tool
from gateway.request_errors import BadField
from gateway.wire.constraints.format_structs import StrictStruct
from gateway.wire.constraints.to_grammar import check_size
from gateway.wire.constraints.to_tool_use import named_at
from gateway.wire.constraints.tool_structs import ToolName
from gateway.wire.openai.chat import Unsupported

MAX_FUNCTIONS = 1024
"""The bound over all namespaces: agents bring the tools of many servers."""
SEPARATOR = "__"
TEXT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {TEXT_ARGUMENT: {"type": "string"}},
    "required": [TEXT_ARGUMENT],
    "additionalProperties": False,
}


class ResponseFunctionTool(StrictStruct, tag_field="type", tag="function"):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema. null: it takes none."""
    strict: bool | None = None
    """Arguments are kept to the schema. Where a call is forced they are in any case."""
    allowed_callers: Unsupported = None
    defer_loading: Unsupported = None
    output_schema: Unsupported = None


class FreeText(StrictStruct, tag_field="type", tag="text"):
    pass


class GrammarText(StrictStruct, tag_field="type", tag="grammar"):
    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(StrictStruct, tag_field="type", tag="custom"):
    """A tool that takes a text, be it of a grammar."""

    name: ToolName
    description: str | None = None
    format: FreeText | GrammarText | None = None
    allowed_callers: Unsupported = None
    defer_loading: Unsupported = None

    @property
    def parameters(self) -> dict[str, Any]:
        return TEXT_SCHEMA

    @property
    def strict(self) -> bool:
        """Return whether a call's text is kept to a grammar, as OpenAI's models keep it."""
        return isinstance(self.format, GrammarText)


class NamespaceTool(StrictStruct, tag_field="type", tag="namespace"):
    """Tools under one name, as agents group those of one server."""

    name: ToolName
    tools: Annotated[list[ResponseFunctionTool | CustomTool], Meta(max_length=MAX_FUNCTIONS)]
    description: str | None = None


class WebSearchTool(msgspec.Struct, tag_field="type", tag="web_search"):
    """A tool that OpenAI's servers run, whatever else it says; left out, as the next three."""


class WebSearchPreviewTool(msgspec.Struct, tag_field="type", tag="web_search_preview"):
    pass


class ImageGenerationTool(msgspec.Struct, tag_field="type", tag="image_generation"):
    pass


class ToolSearchTool(msgspec.Struct, tag_field="type", tag="tool_search"):
    pass


HostedTool = WebSearchTool | WebSearchPreviewTool | ImageGenerationTool | ToolSearchTool
ClientTool = ResponseFunctionTool | CustomTool


class CalledTool(NamedTuple):
    """A tool as the client names it."""

    name: str
    namespace: str | UnsetType = UNSET
    takes_text: bool = False


class ClientTools(NamedTuple):
    """A request's own tools, as the model knows them and as the client does."""

    functions: dict[str, Tool]
    """As the model is shown them, by the names that it knows."""
    called: dict[str, CalledTool]
    """By the same names; those that the client has under another name or in another form."""


def alias_of(name: str, namespace: str | UnsetType | None) -> str:
    """Return the name under which the model knows a tool."""
    return name if not namespace else f"{namespace.rstrip('_')}{SEPARATOR}{name}"


def to_client_tools(tools: Iterable[tuple[str, Any]]) -> ClientTools:
    """Read a request's tools, each with its path. Raises BadField."""
    functions: list[tuple[str, ShownTool]] = []
    called: dict[str, CalledTool] = {}
    for path, tool in flattened(tools):
        function = ShownTool.of(tool)
        functions.append((path, function))
        if len(functions) > MAX_FUNCTIONS:
            raise BadField(f"Invalid value for 'tools': more than {MAX_FUNCTIONS}.", param="tools")
        if isinstance(tool.tool, CustomTool) or tool.namespace is not UNSET:
            called[function.name] = CalledTool(
                tool.tool.name, tool.namespace, isinstance(tool.tool, CustomTool)
            )
    found = named_at(functions)
    for path, function in functions:
        if function.form is not None:
            form = OutputForm(function.form, f"{path}.format.definition")
            check_size(form)
            found[function.name] = msgspec.structs.replace(
                found[function.name], text_form=form.grammar, param=form.param
            )
    return ClientTools(found, called)


class PlacedTool(NamedTuple):
    tool: ClientTool
    namespace: str | UnsetType = UNSET
    of_all: str | None = None
    """The description of its namespace."""


def flattened(tools: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, PlacedTool]]:
    for path, tool in tools:
        if isinstance(tool, NamespaceTool):
            for index, inner in enumerate(tool.tools):
                yield f"{path}.tools[{index}]", PlacedTool(inner, tool.name, tool.description)
        elif isinstance(tool, ClientTool):
            yield path, PlacedTool(tool)


class ShownTool(NamedTuple):
    """A tool as the function that the model is shown."""

    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None
    form: Grammar | None

    @classmethod
    def of(cls, placed: PlacedTool) -> ShownTool:
        tool = placed.tool
        name, said = alias_of(tool.name, placed.namespace), tool.description
        if not isinstance(tool, CustomTool):
            return cls(name, said, tool.parameters, tool.strict, None)
        form = None
        if isinstance(tool.format, GrammarText):
            form = Grammar(kind=tool.format.syntax, text=tool.format.definition)
            said = f"{said or ''}\n\n{explained(tool.format)}".strip()
        return cls(name, said, tool.parameters, tool.strict, form)


def explained(form: GrammarText) -> str:
    """Say to the model what the text must be like."""
    kind = "Lark grammar" if form.syntax == "lark" else "regular expression"
    return f"`{TEXT_ARGUMENT}` is one text that follows this {kind}:\n{form.definition}"
