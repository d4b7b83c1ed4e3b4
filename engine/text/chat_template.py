"""Messages to the one string a model was trained to continue: a folder's Jinja chat template.

Renders as transformers' `apply_chat_template(tokenize=False)` does: the same environment, the same
extra functions and filters. Knows no token ids, no torch, no transformers.

Templates come with the model and messages with the request. The sandbox keeps both from reaching
Python's internals and from changing what they are given; `range` is bounded by it, the output by
`MAX_RENDERED_CHARS`. What is not bounded is time within an expression: a template is as trusted as
the model folder it came with. Render off the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import ConfigError, InvalidRequest
from engine.text.tokenizer import read_tokenizer_config, special_tokens
from engine.text.tool_call_history import CallForm, Message, find_form, in_form

MAX_RENDERED_CHARS = 32 * 1024 * 1024
"""A rendered prompt of this size exceeds every context; the tokenizer's count is the real limit."""


class ChatTemplate:
    """`templates`: by name; "default" is used, or "tool_use" where it exists and tools are given.
    `context`: the special tokens that a template may name."""

    def __init__(
        self,
        templates: Mapping[str, str],
        context: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        environment = _environment(now)
        try:
            self._templates = {
                name: environment.from_string(source) for name, source in templates.items()
            }
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error
        self._context = dict(context)
        self._call_forms: dict[str, CallForm] = {}
        """By template; found when it is first wanted."""
        parsed = map(environment.parse, templates.values())
        self.variables: frozenset[str] = frozenset().union(
            *map(meta.find_undeclared_variables, parsed)
        )
        """The variables that templates read and do not set themselves: `tools`,
        `enable_thinking`."""
        self.source = "\n".join(templates.values())
        """As it was written, by which an output format is told."""

    @property
    def takes_tools(self) -> bool:
        """Whether it tells the model of tools; else they would be offered to nobody."""
        return "tools" in self.variables

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        file: Path | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> ChatTemplate:
        """As `find`. Raises `ConfigError` when there is none, too."""
        found = cls.find(folder, file=file, now=now)
        if found is None:
            raise ConfigError(
                f"{folder} has no chat template, neither in chat_template.jinja "
                "nor as chat_template in tokenizer_config.json"
            )
        return found

    @classmethod
    def find(
        cls,
        folder: Path,
        *,
        file: Path | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> ChatTemplate | None:
        """From `file`, where one is given, else the folder's `chat_template.jinja`, else its
        `tokenizer_config.json`; None where there is none. Raises `ConfigError` for a broken one."""
        config = read_tokenizer_config(folder)
        path = file or folder / "chat_template.jinja"
        if file is not None or path.exists():
            try:
                templates = {"default": path.read_text(encoding="utf-8")}
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{path} cannot be read: {error}") from error
        else:
            path = folder / "tokenizer_config.json"
            templates = _named_templates(config.get("chat_template"))
        if "default" not in templates:
            return None
        try:
            return cls(templates, special_tokens(config), now=now)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The prompt. `options`: what else the template may look at, by its own name. Raises
        `InvalidRequest` for messages that the template refuses or that are
        not of the shape it expects; `message` is the template's own, for the log."""
        use_tools = tools is not None and "tool_use" in self._templates
        name = "tool_use" if use_tools else "default"
        given = {"tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        if any(message.get("tool_calls") for message in messages):
            messages = in_form(messages, self.call_form(name))
        return self._render(name, {**self._context, **options, "messages": messages, **given})

    def call_form(self, name: str = "default") -> CallForm:
        """How a template takes the calls of earlier turns."""
        if name not in self._call_forms:
            self._call_forms[name] = find_form(
                lambda messages: self._render(name, {**self._context, "messages": messages})
            )
        return self._call_forms[name]

    def _render(self, name: str, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        size_chars = 0
        try:
            for piece in self._templates[name].generate(variables):
                pieces.append(piece)
                size_chars += len(piece)
                if size_chars > MAX_RENDERED_CHARS:
                    raise jinja2.TemplateError(f"more than {MAX_RENDERED_CHARS} characters")
        except _REFUSALS as error:
            reason = f"{type(error).__name__}: {error}"
            raise InvalidRequest(f"chat template: {reason}", param="messages") from error
        return "".join(pieces)


_REFUSALS = (
    jinja2.TemplateError,  # raise_exception, undefined names, what the sandbox forbids
    TypeError,  # the rest: messages of another shape than the template's code expects
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


def _named_templates(found: object) -> dict[str, str]:
    """`chat_template` in `tokenizer_config.json`: one string, or a list of {name, template}."""
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, list):
        try:
            return {str(entry["name"]): str(entry["template"]) for entry in found}
        except (TypeError, KeyError) as error:
            raise ConfigError("chat_template: each entry needs a name and a template") from error
    return {}


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    def strftime_now(format: str) -> str:
        return now().strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes `<`, `>`, `&` and `'` for HTML, which no model was trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks what training learns from; here it is only
    its body. As in transformers that is a call block, with a scope of its own."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_body")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()
