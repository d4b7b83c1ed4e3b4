"""A chat completion's body to a `GenerateRequest`, or the name of the field that is in the way.

Knows no HTTP and no replica. Every refusal is a `BadField` that names its field the way a client
wrote it: `messages[0].content[1].type`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypedDict, TypeVar

import msgspec
from msgspec.json import Decoder

from engine.protocol import Grammar
from gateway.generate_request import (
    ChatPrompt,
    Dialect,
    GenerateRequest,
    OutputForm,
    ReasoningEffort,
    ToolUse,
)
from gateway.request_errors import BadField
from gateway.wire.constraints.to_grammar import (
    check_size,
    of_choice,
    of_grammar,
    of_response_format,
    of_schema,
    of_structured_outputs,
)
from gateway.wire.constraints.to_tool_use import (
    allowed,
    known,
    named_once,
    offered,
    only_with_tools,
)
from gateway.wire.constraints.tool_structs import (
    AllowedToolChoice,
    FunctionDefinition,
    NamedFunction,
    NamedTool,
)
from gateway.wire.openai.chat import (
    MAX_TEMPLATE_KWARGS_BYTES,
    OTHER_ROLE,
    AnyRoleRequest,
    AssistantMessage,
    ChatCompletionRequest,
    SampledRequest,
    StreamOptions,
)
from gateway.wire.openai.chat_messages import text_size_of_calls, to_messages
from gateway.wire.openai.forward import check_forward, without_ours
from gateway.wire.shared.cache_control import to_breakpoints
from gateway.wire.shared.refusals import check_values, decode, unsupported

T = TypeVar("T")
MAX_MODEL_CHARS = 256
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
TEMPLATES_OWN = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "tokenize", "conversation", "raise_exception", "strftime_now"),
        *("bos_token", "eos_token", "unk_token", "pad_token"),
    }
)
"""Variables of a chat template that no client may set."""


class Peek(msgspec.Struct, frozen=True):
    """The fields that decide who reads the rest of a body."""

    model: str
    stream: bool


class _PeekedBody(msgspec.Struct, frozen=True):
    model: str | None = None
    stream: bool | None = None


_peek_decoder = msgspec.json.Decoder(_PeekedBody)
_request_decoder = msgspec.json.Decoder(ChatCompletionRequest)
_any_role_decoder: Decoder[ChatCompletionRequest] = Decoder(AnyRoleRequest)
_any_decoder = msgspec.json.Decoder()
_ROLE = re.compile(r"messages\[[0-9]+\]\.role")
_ROLE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_raw_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def peek(body: bytes) -> Peek:
    """Read the model and the mode, without looking at the rest. Raises BadField."""
    peeked = decode(_peek_decoder, body)
    return _checked(peeked)


def peek_or_name(body: bytes, default: Callable[[], str | None]) -> tuple[bytes, Peek]:
    """Return the body with its model, which is `default` where the body names none, and what `peek`
    says of it. Raises BadField."""
    peeked = decode(_peek_decoder, body)
    if peeked.model is None and (model := default()) is not None:
        peeked = _PeekedBody(model, peeked.stream)
        body = with_model(body, model)
    return body, _checked(peeked)


def with_model(body: bytes, model: str) -> bytes:
    """Write a model into an object, whose other fields stay as they are written. Raises
    BadField."""
    fields = decode(_raw_decoder, body)
    fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(fields)


def _checked(peeked: _PeekedBody) -> Peek:
    if not peeked.model:
        raise BadField("you must provide a model parameter", param="model")
    if len(peeked.model) > MAX_MODEL_CHARS:
        raise BadField(
            f"Invalid value for 'model': more than {MAX_MODEL_CHARS} characters.", param="model"
        )
    return Peek(peeked.model, bool(peeked.stream))


def from_openai(body: bytes, dialect: Dialect) -> GenerateRequest:
    """Raises BadField."""
    check_values(body)
    if dialect == "upstream":
        return to_forward(decode(_any_decoder, body))
    if dialect == "vllm":
        found = with_any_roles(_request_decoder, _any_role_decoder, body)
        return as_vllms(to_generate(found))
    return to_generate(decode(_request_decoder, body))


def as_vllms(request: GenerateRequest) -> GenerateRequest:
    return msgspec.structs.replace(request, speaks_vllm=True)


def with_any_roles(plain: Decoder[T], with_others: Decoder[T], body: bytes) -> T:
    """Read a body whose messages may be of roles that OpenAI does not know, as `OtherMessage`.
    Raises BadField."""
    try:
        return decode(plain, body)
    except BadField as error:
        if error.param is None or _ROLE.fullmatch(error.param) is None:
            raise
        fields = decode(_any_decoder, body)
        for message in fields["messages"]:
            role = message.get("role") if isinstance(message, dict) else None
            if isinstance(role, str) and role not in ROLES:
                if _ROLE_NAME.fullmatch(role) is None:
                    raise
                message |= {"role": OTHER_ROLE, OTHER_ROLE: role}
    return decode(with_others, msgspec.json.encode(fields))


def to_forward(body: Any) -> GenerateRequest:
    fields = check_forward(body)
    return GenerateRequest(
        model=fields.model,
        stream=fields.stream,
        include_usage=fields.include_usage,
        continuous_usage=fields.continuous_usage,
        n=fields.n,
        service_tier=fields.service_tier,
        cache_key=fields.cache_key,
        has_tools=fields.has_tools,
        forward=without_ours(body),
    )


def to_generate(request: ChatCompletionRequest) -> GenerateRequest:
    messages = to_messages(request.messages)
    usage = usage_of_stream(request.stream_options, request.stream)
    check_turn(request)
    form, tools = output_form(request), tool_use(request)
    effort, effort_param = reasoning_effort(request)
    kwargs = template_kwargs(request.chat_template_kwargs)
    if request.min_tokens:
        refuse_beside_ends(request.stop, form, tools)
    return GenerateRequest(
        model=request.model,
        stream=bool(request.stream),
        include_usage=usage.included,
        continuous_usage=usage.continuous,
        n=request.n or 1,
        service_tier=request.service_tier,
        cache_key=request.prompt_cache_key,
        has_tools=bool(request.tools or request.functions),
        calls_function=bool(request.functions),
        prompt=ChatPrompt(
            messages=messages,
            breakpoints=to_breakpoints(request.messages, request.tools or ()),
            num_other_chars=text_size_of_calls(request.messages) + size_of(kwargs),
            max_tokens=max_tokens(request),
            logprobs=logprobs(request),
            form=form,
            reasoning_effort=effort,
            effort_param=effort_param,
            effort_is_hint=True,
            tools=tools,
            continues=bool(request.continue_final_message),
            add_generation_prompt=request.add_generation_prompt is not False,
            echo=bool(request.echo),
            template_kwargs=kwargs,
            **sampling(request),
        ),
    )


def check_turn(request: ChatCompletionRequest) -> None:
    """Check whose turn it is said to be. Raises BadField."""
    if not request.continue_final_message:
        return
    param = "continue_final_message"
    if request.add_generation_prompt:
        raise BadField(f"'{param}' cannot stand beside 'add_generation_prompt'.", param=param)
    last = request.messages[-1]
    if not isinstance(last, AssistantMessage) or last.tool_calls or not last.content:
        raise BadField(
            f"Invalid value for '{param}': the last message is no text of the assistant.",
            param=param,
        )


def template_kwargs(asked: dict[str, Any] | None) -> dict[str, Any]:
    """Return the variables for a chat template. Raises BadField for those that are not the
    client's, and where they are too large."""
    found = asked or {}
    param = "chat_template_kwargs"
    for name in found:
        if name in TEMPLATES_OWN:
            raise unsupported(f"{param}.{name}", "not supported: it is not the client's")
    size_bytes = size_of(found)
    if size_bytes > MAX_TEMPLATE_KWARGS_BYTES:
        raise BadField(
            f"Invalid value for '{param}': more than {MAX_TEMPLATE_KWARGS_BYTES} bytes.",
            param=param,
        )
    return found


def size_of(kwargs: dict[str, Any]) -> int:
    """Return the size in bytes of JSON. Raises BadField."""
    if not kwargs:
        return 0
    try:
        return len(msgspec.json.encode(kwargs))
    except RecursionError as error:  # decoding it had a few frames more
        param = "chat_template_kwargs"
        raise BadField(f"Invalid value for '{param}': nested too deep.", param=param) from error


def reasoning_effort(request: ChatCompletionRequest) -> tuple[ReasoningEffort | None, str]:
    """Return the effort and the field that asked for it. Raises BadField."""
    other = None if request.reasoning is None else request.reasoning.effort
    if other is None:
        return request.reasoning_effort, "reasoning_effort"
    if request.reasoning_effort not in (None, other):
        raise BadField(
            "'reasoning_effort' and 'reasoning.effort' differ; give one.", param="reasoning.effort"
        )
    return other, "reasoning.effort"


class SamplingFields(TypedDict):
    """The fields of `CallFormat` that say how tokens are sampled."""

    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: dict[int, float]
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    seed: int | None
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    prompt_logprobs: int | None
    logprob_token_ids: tuple[int, ...]
    return_token_ids: bool | None
    return_tokens_as_token_ids: bool
    priority: int


def sampling(request: SampledRequest) -> SamplingFields:
    """Raises BadField."""
    top_p, top_k = nucleus(request.top_p, request.top_k)
    check_logprobs(request)
    return SamplingFields(
        min_tokens=request.min_tokens or 0,
        temperature=default(request.temperature, 1.0),
        top_p=top_p,
        top_k=top_k,
        min_p=request.min_p or 0.0,
        repetition_penalty=default(request.repetition_penalty, 1.0),
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        logit_bias=request.logit_bias or {},
        stop=stop_strings(request.stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        seed=request.seed,
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        prompt_logprobs=request.prompt_logprobs,
        logprob_token_ids=tuple(request.logprob_token_ids or ()),
        return_token_ids=request.return_token_ids,
        return_tokens_as_token_ids=bool(request.return_tokens_as_token_ids),
        priority=request.priority or 0,
    )


def check_logprobs(request: SampledRequest) -> None:
    """Raises BadField."""
    if request.prompt_logprobs is not None and request.stream:
        raise BadField(
            "The 'prompt_logprobs' parameter is not available when 'stream' is enabled.",
            param="prompt_logprobs",
        )
    asked = getattr(request, "logprobs", None)
    if request.logprob_token_ids and (asked is None or asked is False):
        raise BadField(
            "The 'logprob_token_ids' parameter is only allowed when 'logprobs' is enabled.",
            param="logprob_token_ids",
        )


def nucleus(top_p: float | None, top_k: int | None) -> tuple[float, int]:
    """Return top_p in (0, 1] and top_k, 0 for all, as our engine has them."""
    if top_p == 0:  # only the most likely token is left of the nucleus
        return 1.0, 1
    return default(top_p, 1.0), max(0, top_k or 0)


def refuse_beside_ends(stop: object, form: OutputForm | None, tools: ToolUse | None = None) -> None:
    """Refuse `min_tokens` where something else says when an answer is over."""
    beside = "stop" if stop else None
    if form is not None:
        beside = form.param
    elif tools is not None and tools.is_kept_to:
        beside = "tools"
    if beside is not None:
        raise unsupported("min_tokens", f"not supported together with '{beside}'")


def default(value: float | None, absent: float) -> float:
    return absent if value is None else value


class StreamUsage(NamedTuple):
    """The usage that a client wants of a stream."""

    included: bool
    continuous: bool


def usage_of_stream(options: StreamOptions | None, stream: bool | None) -> StreamUsage:
    """Raises BadField."""
    if options is None:
        return StreamUsage(False, False)
    if not stream:
        raise BadField(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            param="stream_options",
        )
    if options.include_obfuscation:
        raise unsupported(
            "stream_options.include_obfuscation", "not supported: chunks are not padded"
        )
    included = bool(options.include_usage)
    return StreamUsage(included, included and bool(options.continuous_usage_stats))


def max_tokens(request: ChatCompletionRequest) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise BadField(
            "'max_tokens' and 'max_completion_tokens' differ; give one of them.", param="max_tokens"
        )
    return old if new is None else new


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def logprobs(request: ChatCompletionRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs is not None:
        raise BadField(
            "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled.",
            param="top_logprobs",
        )
    return None


def output_form(request: SampledRequest) -> OutputForm | None:
    """Return the format of the answer; None: free text. Raises BadField."""
    forms = list(forms_asked(request))
    if len(forms) > 1:
        first, second = forms[0].param, forms[1].param
        raise BadField(f"'{first}' and '{second}' both name a form; give one.", param=second)
    if not forms:
        return None
    [form] = forms
    check_size(form)
    return form


def forms_asked(request: SampledRequest) -> Iterator[OutputForm]:
    if request.response_format is not None:
        yield from of_response_format(request.response_format)
    if request.structured_outputs is not None:
        yield from of_structured_outputs(request.structured_outputs)
    if request.guided_json is not None:
        yield of_schema(request.guided_json, "guided_json")
    if request.guided_regex is not None:
        yield OutputForm(Grammar(kind="regex", text=request.guided_regex), "guided_regex")
    if request.guided_choice is not None:
        yield of_choice(request.guided_choice, "guided_choice")
    if request.guided_grammar is not None:
        yield of_grammar(request.guided_grammar, "guided_grammar")


def tool_use(request: ChatCompletionRequest) -> ToolUse | None:
    """Return the tools that the model is shown; None: it is shown none. Raises BadField."""
    tools, choice = request.tools, request.tool_choice
    if request.functions:
        return function_use(request, request.functions)
    if not tools:
        refuse_without_tools(request)
        return None
    by_name = named_once((tool.function for tool in tools), "tools[{}].function")
    if choice == "none":
        return None
    forced: tuple[str, ...] = ()
    match choice:
        case "required":
            forced = tuple(by_name)
        case NamedTool():
            forced = (known(choice.function.name, by_name, "tool_choice.function.name"),)
        case AllowedToolChoice():
            names = (each.function.name for each in choice.allowed_tools.tools)
            by_name = allowed(names, by_name, "tool_choice.allowed_tools.tools[{}].function.name")
            forced = tuple(by_name) if choice.allowed_tools.mode == "required" else ()
    parallel = request.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
    return offered(by_name, forced, parallel=parallel)


def function_use(
    request: ChatCompletionRequest, functions: list[FunctionDefinition]
) -> ToolUse | None:
    """Return the functions of the older form as tools, of which one is called at most; None: the
    model is shown none. Raises BadField."""
    for param in ("tools", "tool_choice"):
        if getattr(request, param):
            raise BadField(f"'{param}' cannot stand beside 'functions'; give one.", param=param)
    by_name = named_once(functions, "functions[{}]")
    choice = request.function_call
    if choice == "none":
        return None
    forced: tuple[str, ...] = ()
    if isinstance(choice, NamedFunction):
        forced = (known(choice.name, by_name, "function_call.name"),)
    return offered(by_name, forced, parallel=False)


def refuse_without_tools(request: ChatCompletionRequest) -> None:
    """Refuse that a tool be called, where there are none."""
    if request.tool_choice not in (None, "none", "auto"):
        raise only_with_tools("tool_choice")
    if isinstance(request.function_call, NamedFunction):
        param = "function_call"
        raise BadField(f"'{param}' is only allowed when 'functions' are specified.", param=param)
