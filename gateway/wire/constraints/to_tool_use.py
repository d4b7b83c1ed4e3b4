"""Checks the tools of a request: which ones the model is shown, and which of them it must call.

How a call looks in a model's output is the model's own affair (`engine.text.output_parser`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

from gateway.generate_request import Tool, ToolUse
from gateway.request_errors import BadField

NAME = re.compile("[a-zA-Z0-9_-]+")
"""The characters that OpenAI and Anthropic allow in a tool's name. The field bounds its length."""


class Function(Protocol):
    """The fields of a tool that every surface has."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str | None: ...

    @property
    def parameters(self) -> dict[str, Any] | None:
        """A JSON schema. None: it takes none."""

    @property
    def strict(self) -> bool | None: ...


def only_with_tools(param: str) -> BadField:
    return BadField(f"'{param}' is only allowed when 'tools' are specified.", param=param)


def named_twice(param: str) -> BadField:
    return BadField(f"Invalid value for '{param}': two tools have it.", param=param)


def unnamed(param: str) -> BadField:
    return BadField(f"Invalid value for '{param}': no tool has that name.", param=param)


def check_name(name: str, param: str) -> None:
    """Raises BadField."""
    if NAME.fullmatch(name) is None:
        raise BadField(
            f"Invalid '{param}': string does not match pattern. Expected a string that matches the"
            " pattern '^[a-zA-Z0-9_-]+$'.",
            param=param,
        )


def check_is_object(parameters: dict[str, Any] | None, param: str) -> None:
    """Raises BadField."""
    if parameters and parameters.get("type", "object") != "object":
        raise BadField(
            f"Invalid value for '{param}': arguments are an object, "
            "so the schema's type has to be 'object'.",
            param=param,
        )


def named_once(
    functions: Iterable[Function], place: str, schema: str = "parameters"
) -> dict[str, Tool]:
    """Return the tools by name, each named once. place: of each, by its index; schema: the name of
    the field of its parameters there.

    Raises BadField.
    """
    placed = ((place.format(index), function) for index, function in enumerate(functions))
    return named_at(placed, schema)


def named_at(
    functions: Iterable[tuple[str, Function]], schema: str = "parameters"
) -> dict[str, Tool]:
    """As `named_once`, of tools that come with their paths."""
    found: dict[str, Tool] = {}
    for field, function in functions:
        check_name(function.name, f"{field}.name")
        if function.name in found:
            raise named_twice(f"{field}.name")
        param = f"{field}.{schema}"
        check_is_object(function.parameters, param)
        found[function.name] = Tool(
            name=function.name,
            shown=shown(function),
            parameters=function.parameters,
            strict=bool(function.strict),
            param=param,
        )
    return found


def shown(function: Function) -> dict[str, Any]:
    """Return a tool as chat templates expect it: without what the client left out, and without
    `strict`, which no model was trained on."""
    said: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        said["description"] = function.description
    if function.parameters is not None:
        said["parameters"] = function.parameters
    return {"type": "function", "function": said}


def known(name: str, by_name: Mapping[str, Tool], param: str) -> str:
    """Raises BadField."""
    if name not in by_name:
        raise unnamed(param)
    return name


def allowed(names: Iterable[str], by_name: Mapping[str, Tool], place: str) -> dict[str, Tool]:
    """Return the allowed tools in the order of `tools`, so that the order of the names changes no
    prompt.

    place: of each name, by its index. Raises BadField.
    """
    listed = {known(name, by_name, place.format(index)) for index, name in enumerate(names)}
    return {name: tool for name, tool in by_name.items() if name in listed}


def offered(by_name: Mapping[str, Tool], forced: tuple[str, ...], *, parallel: bool) -> ToolUse:
    """Raises BadField."""
    return ToolUse(
        tools=tuple(by_name.values()),
        forced=forced,
        parallel=parallel,
        num_chars=sum(text_size(tool) for tool in by_name.values()),
    )


def text_size(tool: Tool) -> int:
    """Count the characters that the model is shown of it, about."""
    try:
        return len(msgspec.json.encode(tool.shown))
    except RecursionError as error:  # decoding it had a few frames more
        message = f"Invalid value for '{tool.param}': nested too deep."
        raise BadField(message, param=tool.param) from error
