"""Talks to a model as its folder says: prompts by its chat template, its outputs read by its
family's form for calls and reasoning, and kept to what a request wants of them.

Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from engine.errors import InvalidRequest
from engine.protocol import Grammar
from engine.text.chat_template import ChatTemplate
from engine.text.output_parser.grammars.ebnf import EbnfError
from engine.text.output_parser.grammars.forced_calls import TEXT_ARGUMENT, Tool
from engine.text.output_parser.grammars.quoted_lark import LarkError, quoted_lark
from engine.text.output_parser.output_format import OutputFormat
from engine.text.output_parser.reading.reader import MAX_CALLS
from engine.text.output_parser.reasoning import ReasoningState
from engine.text.tokenizer import Tokenizer
from gateway.fleet.engine.bounded_schema import bounded_schema, guiding_schema
from gateway.fleet.engine.choice_text import ChoiceParser
from gateway.fleet.engine.folder_options import NO_OPTIONS, FolderOptions
from gateway.fleet.engine.kept_prefixes import NO_PREFIXES, Prefixes, find_breakpoints, to_prefixes
from gateway.fleet.engine.message_places import chars_before, place_at
from gateway.fleet.replica import MessagePlace
from gateway.generate_request import (
    ChatPrompt,
    OutputForm,
    ReasoningEffort,
    ToolUse,
    ToTokenize,
)
from gateway.generate_request import Tool as OfferedTool
from gateway.request_errors import BadField, ContextTooLong, UnsupportedField
from gateway.wire.constraints.to_grammar import check_size, encoded

ANY_OBJECT = {"type": "object"}
MAX_GUIDE_BYTES = 16_384
"""The bound on the tools whose calls are guided unasked: a grammar of them takes milliseconds."""
GOES_ON = "\ue0f0goes on\ue0f1"
"""Behind the beginning of an answer, while a template writes what stands around it."""
THINKING_SWITCHES = ("enable_thinking", "thinking")
"""The template variables that switch thinking off: Qwen's and DeepSeek's."""
FOLDED_ROLES = ("system", "user")


class RenderedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as the model reads it."""

    token_ids: list[int]
    reasoning_state: ReasoningState = "unsaid"
    form: OutputForm | None = None
    """The grammar that the output must follow after its reasoning."""
    kept: Prefixes = NO_PREFIXES
    """The prefixes of the prompt to keep in the cache."""
    span_keys: tuple[int, ...] = ()
    """The keys of its spans (`engine.prefix_digests`), where somebody asked for them."""


class ModelFormat:
    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        output: OutputFormat | None = None,
        options: FolderOptions = NO_OPTIONS,
    ) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._template = template
        self._output = output or OutputFormat(tokenizer, template.source)

    @property
    def source(self) -> str:
        """The chat template as it was written."""
        return self._template.source

    @property
    def takes_tools(self) -> bool:
        return self._template.takes_tools

    def check(self, prompt: ChatPrompt) -> None:
        """Check what can be said before anything is rendered. Raises UnsupportedField."""
        if prompt.reasoning_effort is not None and not prompt.effort_is_hint:
            options = effort_options(prompt.reasoning_effort, self._template.variables)
            thinks = self._output.reasoning != "none"
            if not options and thinks == (prompt.reasoning_effort == "none"):
                why = "thinks always" if thinks else "does not think"
                raise no_effort(prompt.effort_param, why)
        if self._template.takes_tools:
            return
        if prompt.tools is not None:
            raise no_tools("tools")
        for index, message in enumerate(prompt.messages):
            if message["role"] == "tool":
                raise no_tools(under(prompt, index, "role"))
            if "tool_calls" in message:
                raise no_tools(under(prompt, index, "tool_calls"))

    def token_ids(self, prompt: ChatPrompt, asked: ToTokenize, max_model_len: int) -> list[int]:
        """Raises BadField, ContextTooLong."""
        text, prompt = self._rendered(prompt)
        self._refuse_the_hopeless(text, max_model_len)
        return self._tokenizer.encode(text, asked.add_special_tokens)

    def render(
        self, prompt: ChatPrompt, max_model_len: int, block_size: int | None = None
    ) -> RenderedPrompt:
        """Render a conversation, off the event loop where it is long. `block_size`: of the prefixes
        that the engine keeps; None: of this model it keeps none. Raises BadField,
        ContextTooLong."""
        text, prompt = self._rendered(prompt)
        self._refuse_the_hopeless(text, max_model_len)
        state = self._output.reasoning_state(text)
        token_ids, kept = self._encode(prompt, text, block_size)
        return RenderedPrompt(
            token_ids=token_ids,
            reasoning_state=state,
            form=self._form(prompt, state),
            kept=kept,
        )

    def _refuse_the_hopeless(self, text: str, max_model_len: int) -> None:
        """Refuse megabytes that cannot fit, tools and all, before they cost seconds. Raises
        ContextTooLong."""
        if len(text) > max_model_len:  # or no token is shorter than a character
            refuse_more(self._tokenizer.fewest_tokens_in(text), max_model_len)

    def _rendered(self, prompt: ChatPrompt) -> tuple[str, ChatPrompt]:
        """Return the text of a prompt, and the prompt whose it is: folded, where the template takes
        it only so. Raises BadField."""
        try:
            return self._whole_text(prompt), prompt
        except InvalidRequest as error:
            fault = error
        simpler = folded(prompt)
        try:
            if simpler is not None:
                return self._whole_text(simpler), simpler
        except InvalidRequest as error:
            fault = error
        raise BadField(
            "This model's chat template does not take these messages.", param="messages"
        ) from fault

    def _whole_text(self, prompt: ChatPrompt) -> str:
        """Render the prompt's text, up to where the answer goes on. Raises InvalidRequest,
        UnsupportedField."""
        if not prompt.continues:
            return self._text(prompt, prompt.messages, is_whole=prompt.add_generation_prompt)
        *before, last = prompt.messages
        marked = {**last, "content": last["content"] + GOES_ON}
        text = self._text(prompt, [*before, marked], is_whole=False)
        begun, mark, _ = text.rpartition(GOES_ON)
        if not mark:
            param = prompt.path_of(len(before))
            raise UnsupportedField(
                f"Unsupported parameter: '{param}' is not supported by this model, whose chat "
                "template begins no answer.",
                param=param,
            )
        return begun

    def _text(
        self,
        prompt: ChatPrompt,
        messages: Sequence[dict[str, Any]],
        num_tools: int | None = None,
        *,
        is_whole: bool = True,
    ) -> str:
        tools = None if prompt.tools is None else prompt.tools.tools[:num_tools]
        return self._template.render(
            messages,
            tools=[each.shown for each in tools] if tools else None,
            options=template_options(prompt, self._template.variables),
            add_generation_prompt=is_whole,
        )

    def _encode(
        self, prompt: ChatPrompt, text: str, block_size: int | None
    ) -> tuple[list[int], Prefixes]:
        if not prompt.breakpoints or block_size is None:
            return self._tokenizer.encode(text), NO_PREFIXES
        token_ids, ends = self._tokenizer.encode_with_ends(text)
        render = partial(self._text, prompt, is_whole=False)
        return token_ids, to_prefixes(
            token_ids, find_breakpoints(prompt, text, ends, render, block_size)
        )

    def place_of(
        self, prompt: ChatPrompt, token_ids: Sequence[int], position: int
    ) -> MessagePlace | None:
        """Find what a token of a rendered prompt lies in. Renders it again, and parts of it: off
        the event loop. Raises BadField."""
        text, prompt = self._rendered(prompt)
        at = chars_before(self._tokenizer, text, token_ids, position)
        if at is None:
            return None
        return place_at(prompt, text, at, partial(self._text, prompt, is_whole=False))

    def parsing(self, prompt: ChatPrompt, rendered: RenderedPrompt) -> ChoiceParser | None:
        """Return how the output is read. None: all that is said is the answer."""
        use = prompt.tools
        if use is None and self._output.reasoning == "none":
            return None
        names = [] if use is None else callable_names(use)
        return ChoiceParser(
            parser=lambda: self._output.parser(
                tools=names, reasoning_state=rendered.reasoning_state
            ),
            shown_ids=self._output.shown_ids,
            one_call=use is not None and not use.parallel,
        )

    def _form(self, prompt: ChatPrompt, state: ReasoningState) -> OutputForm | None:
        use, form = prompt.tools, prompt.form
        if form is None and (use is None or not use.is_kept_to):
            return None if use is None else self._guide(use, state)
        try:
            if form is not None:
                form = self._bounded_form(form)
            if use is None:
                assert form is not None
                grammar = self._output.answering(form.grammar, reasoning_state=state)
                made = OutputForm(grammar, form.param)
            else:
                made = self._calls(use, form, state)
        except msgspec.DecodeError as error:
            assert form is not None
            raise BadField(
                f"Invalid value for '{form.param}': not JSON.", param=form.param
            ) from error
        except EbnfError as error:
            assert form is not None
            raise BadField(
                f"Invalid value for '{form.param}': {error}.", param=form.param
            ) from error
        check_size(made)
        return made

    def _bounded_form(self, form: OutputForm) -> OutputForm:
        """Bound what a schema leaves free, if the model's folder asks for it. Raises
        msgspec.DecodeError."""
        if form.grammar.kind != "json_schema" or not self._options.bounds_schemas:
            return form
        schema = msgspec.json.decode(form.grammar.text)
        if not isinstance(schema, dict):
            return form
        text = encoded(bounded_schema(schema, self._options), form.param)
        return OutputForm(Grammar(kind="json_schema", text=text), form.param)

    def _callable(self, tool: OfferedTool) -> Tool:
        """Raises BadField."""
        made = to_callable(tool)
        if made.parameters is None or not self._options.bounds_schemas:
            return made
        bounded = bounded_schema(made.parameters, self._options)
        return msgspec.structs.replace(made, parameters=bounded)

    def _guide(self, use: ToolUse, state: ReasoningState) -> OutputForm | None:
        """Return the form of an output whose calls have the names of offered tools and of their
        parameters, which nobody asked for but the model's folder; None where it would be large."""
        if not self._options.guides_calls or not self._output.marks_calls:
            return None
        tools = [Tool(each.name, guiding_schema(each.parameters)) for each in use.tools]
        if not tools or len(msgspec.json.encode(tools)) > MAX_GUIDE_BYTES:
            return None
        most = MAX_CALLS if use.parallel else 1
        return OutputForm(
            self._output.offered(tools, max_calls=most, reasoning_state=state), "tools"
        )

    def _calls(self, use: ToolUse, form: OutputForm | None, state: ReasoningState) -> OutputForm:
        """Return the form of an output with a call that is forced, or kept to a schema, or beside
        an answer that is."""
        names = callable_names(use)
        bound = [each for each in use.tools if each.name in names]
        param = bound[0].param if len(bound) == 1 else "tools"
        most = MAX_CALLS if use.parallel else 1
        if use.forced:
            tools = [self._callable(each) for each in bound]
            grammar = self._output.forced(tools, max_calls=most, reasoning_state=state)
            return OutputForm(grammar, param)
        if form is not None and not self._output.marks_calls:
            raise UnsupportedField(
                f"Unsupported parameter: '{form.param}' is not supported by this model together "
                "with 'tools': it has no marker that tells a call from an answer.",
                param=form.param,
            )
        tools = [
            self._callable(each) if each.strict else Tool(each.name, ANY_OBJECT) for each in bound
        ]
        answer = None if form is None else form.grammar
        grammar = self._output.offered(tools, answer, max_calls=most, reasoning_state=state)
        return OutputForm(grammar, param if form is None else form.param)


def folded(prompt: ChatPrompt) -> ChatPrompt | None:
    """Return the conversation as strict chat templates take it: one system message, which is first,
    then user and assistant in turns. What the system says later on is said by the user, and
    messages in a row are one: agents instruct a model also within a conversation, and say things in
    several messages. None: it has nothing of the kind. Its breakpoints are lost with their
    places."""
    messages: list[dict[str, Any]] = []
    paths: list[str] = []
    for index, message in enumerate(prompt.messages):
        before = messages[-1] if messages else None
        role = message["role"]
        if role == "system" and before is not None and before["role"] != "system":
            role = "user"
        if before is not None and role in FOLDED_ROLES and before["role"] == role:
            messages[-1] = {**before, "content": f"{before['content']}\n{message['content']}"}
        else:
            messages.append({**message, "role": role})
            paths.append(prompt.path_of(index))
    if len(messages) == len(prompt.messages):
        return None
    return msgspec.structs.replace(
        prompt, messages=messages, message_paths=tuple(paths), breakpoints=()
    )


def refuse_more(fewest: int, max_model_len: int) -> None:
    """Raises ContextTooLong, of messages that have so many tokens at least."""
    if fewest > max_model_len:
        raise ContextTooLong(
            f"This model's maximum context length is {max_model_len} tokens. However, your "
            f"messages have at least {fewest}. Please reduce the length of the messages.",
            param="messages",
        )


def to_callable(tool: OfferedTool) -> Tool:
    """Return what a call of a tool is kept to. Raises BadField."""
    form = tool.text_form
    if form is None:
        return Tool(tool.name, tool.parameters)
    if form.kind == "regex":
        text = {"type": "string", "pattern": f"^(?:{form.text})$"}
        return Tool(tool.name, {**(tool.parameters or {}), "properties": {TEXT_ARGUMENT: text}})
    try:
        quoted_lark(form.text)
    except LarkError as error:
        raise BadField(f"Invalid value for '{tool.param}': {error}.", param=tool.param) from error
    return Tool(tool.name, tool.parameters, text_lark=form.text)


def callable_names(use: ToolUse) -> tuple[str, ...]:
    return use.forced or tuple(tool.name for tool in use.tools)


def under(prompt: ChatPrompt, index: int, field: str) -> str:
    """A field of a message, or what the message was made of, where that is no message."""
    path = prompt.path_of(index)
    return path if prompt.message_paths else f"{path}.{field}"


def no_tools(param: str) -> UnsupportedField:
    return UnsupportedField(
        f"Unsupported parameter: '{param}' is not supported by this model, "
        "whose chat template knows no tools.",
        param=param,
    )


def no_effort(param: str, why: str) -> UnsupportedField:
    message = f"Unsupported parameter: '{param}' is not supported by this model, which {why}."
    return UnsupportedField(message, param=param)


def template_options(prompt: ChatPrompt, variables: Collection[str]) -> Mapping[str, Any]:
    """Return what the template is told besides the conversation: how much the model is to think, as
    it takes that, and what the client says to it by name."""
    return {**effort_options(prompt.reasoning_effort, variables), **prompt.template_kwargs}


def effort_options(effort: ReasoningEffort | None, variables: Collection[str]) -> Mapping[str, Any]:
    """Return how much the model is to think, as its template takes it; of one that knows on and off
    alone, all but `none` are on. Nothing for one that knows neither."""
    if effort is None:
        return {}
    if "reasoning_effort" in variables:
        return {"reasoning_effort": effort}
    for switch in THINKING_SWITCHES:
        if switch in variables:
            return {switch: effort != "none"}
    return {}
