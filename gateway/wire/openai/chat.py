"""OpenAI's chat completions as structs: what our engine honours of a request, and what an answer
looks like.

Pure shapes: no conversion, no HTTP. A field that is absent here is unknown; one of type `None` is
known and cannot be honoured yet, so that only null, which means absent, passes. The limits of
numbers are OpenAI's where it has them, else those of vLLM.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.generate_request import ReasoningEffort, ServiceTier
from gateway.wire.constraints.format_structs import (
    Alternatives,
    ResponseFormat,
    SchemaObject,
    StrictStruct,
    StructuredOutputs,
)
from gateway.wire.constraints.tool_structs import (
    MAX_TOOLS,
    CalledFunction,
    FunctionDefinition,
    NamedFunction,
    ToolCalls,
    ToolChoice,
    ToolName,
    Tools,
)
from gateway.wire.shared.cache_control import CacheControl
from gateway.wire.shared.refusals import MAX_INT64, Biases, TokenId
from gateway.wire.usage.cost import UsageCost

MAX_CHOICES = 128
MAX_MESSAGES = 10_000
MAX_PARTS = 10_000
"""The bound on content parts over all messages of a request."""
MAX_STOP_STRINGS = 16
"""OpenAI allows 4."""
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_TOP_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
"""Both as our engine and vLLM have them."""
MAX_PRIORITY = 2**31 - 1
MAX_TEMPLATE_KWARGS = 64
OTHER_ROLE = "\x7f"
"""The name that no client gives to a role or a field."""
MAX_TEMPLATE_KWARGS_BYTES = 64 * 1024

Unsupported: TypeAlias = None
"""The type of a field that is refused by name unless it is null."""

ModelName = Annotated[str, Meta(description="Absent: the only model that the caller may use.")]
PositiveInt = Annotated[int, Meta(ge=1, le=MAX_INT64)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100)]
"""Down to what our engine takes."""
Probability = Annotated[float, Meta(ge=0, le=1)]


Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]


# ---- the request


class TextPart(StrictStruct):
    type: Literal["text"]
    text: str
    image_url: Unsupported = None
    input_audio: Unsupported = None
    file: Unsupported = None
    prompt_cache_breakpoint: Unsupported = None
    cache_control: CacheControl | None = None


Content = str | list[TextPart]


class SystemMessage(StrictStruct, tag_field="role", tag="system"):
    content: Content
    name: str | None = None
    cache_control: CacheControl | None = None


class DeveloperMessage(StrictStruct, tag_field="role", tag="developer"):
    content: Content
    name: str | None = None
    cache_control: CacheControl | None = None


class UserMessage(StrictStruct, tag_field="role", tag="user"):
    content: Content
    name: str | None = None
    cache_control: CacheControl | None = None


class AssistantMessage(StrictStruct, tag_field="role", tag="assistant"):
    """Takes back what a response's `message` holds, so that a client may append it as it came."""

    content: Content | None = None
    """Absent beside calls only."""
    name: str | None = None
    cache_control: CacheControl | None = None
    refusal: Unsupported = None
    annotations: Annotated[list[None], Meta(max_length=0)] | None = None
    audio: Unsupported = None
    function_call: CalledFunction | None = None
    """The older form of one call."""
    tool_calls: ToolCalls | None = None
    reasoning_content: str | None = None
    """Not OpenAI's: what the model thought, for templates that show it."""
    reasoning: str | None = None
    """vLLM's newer name of it, and OpenRouter's."""
    parsed: Any = None
    """A client library's parsed copy of the content; ignored."""
    provider_specific_fields: dict[str, Any] | None = None
    """A field that litellm adds to messages and sends back; ignored."""


class ToolMessage(StrictStruct, tag_field="role", tag="tool"):
    content: Content
    tool_call_id: str
    name: str | None = None
    cache_control: CacheControl | None = None


class FunctionMessage(StrictStruct, tag_field="role", tag="function"):
    """The older form of a result: of the last call of that name."""

    content: Content
    name: ToolName
    cache_control: CacheControl | None = None


class OtherMessage(StrictStruct, tag_field="role", tag=OTHER_ROLE):
    """A message of a role that OpenAI does not know, in vLLM's dialect: what the chat template
    makes of it is that one's affair."""

    content: Content
    own_role: str = msgspec.field(name=OTHER_ROLE)
    name: str | None = None
    cache_control: CacheControl | None = None


Message = (
    SystemMessage
    | DeveloperMessage
    | UserMessage
    | AssistantMessage
    | ToolMessage
    | FunctionMessage
)


TemplateKwargs = Annotated[dict[str, Any], Meta(max_length=MAX_TEMPLATE_KWARGS)]


class ChatReasoning(StrictStruct):
    """The object that OpenRouter has for `reasoning_effort`."""

    effort: ReasoningEffort | None = None


class StreamOptions(StrictStruct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's: with `include_usage`, the usage so far stands in every chunk."""
    include_obfuscation: bool | None = None


class SampledRequest(StrictStruct, kw_only=True):
    """The fields that completions of chats and of texts have in common."""

    model: ModelName = ""
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    stop: StopString | StopStrings | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=MAX_INT64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    # vLLM's
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT64)] | None = None
    min_p: Probability | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_INT64)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    logprob_token_ids: (
        Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_LOGPROB_TOKEN_IDS)] | None
    ) = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaObject | str | None = None
    guided_regex: str | None = None
    guided_choice: Alternatives | None = None
    guided_grammar: str | None = None
    allowed_token_ids: Unsupported = None
    bad_words: Unsupported = None


AnyMessage: TypeAlias = Message | OtherMessage
AnyMessages = Annotated[list[AnyMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


class ChatCompletionRequest(SampledRequest, kw_only=True):
    """The body of `POST /v1/chat/completions` for our own engine."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    modalities: list[Literal["text"]] | None = None
    service_tier: ServiceTier | None = None
    store: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    reasoning: ChatReasoning | None = None
    verbosity: Literal["medium"] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[FunctionDefinition], Meta(max_length=MAX_TOOLS)] | None = None
    """The older form of `tools`."""
    function_call: Literal["none", "auto"] | NamedFunction | None = None

    # Labels: for OpenAI's abuse checks, its cache routing, what it stores. Nothing to honour or to
    # break here.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: Metadata | None = None

    # vLLM's
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None

    audio: Unsupported = None
    chat_template: Unsupported = None
    documents: Unsupported = None
    moderation: Unsupported = None
    prediction: Unsupported = None
    prompt_cache_options: Unsupported = None
    prompt_cache_retention: Unsupported = None
    web_search_options: Unsupported = None


class AnyRoleRequest(ChatCompletionRequest, kw_only=True):
    """The same with messages of roles that OpenAI does not know."""

    messages: AnyMessages  # type: ignore[assignment]


# ---- the answer


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    audio_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class CompletionUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The usage of an answer: `prompt_tokens` includes cached ones, `completion_tokens`
    reasoning."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None
    """null, as the next: nothing was cached, in vLLM's dialect."""
    completion_tokens_details: CompletionTokensDetails | None
    cost: UsageCost | UnsetType = UNSET
    """The cost, if it was requested."""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    """Unix seconds."""
    owned_by: str
    root: str
    """vLLM's, as the next two: its own name."""
    parent: str | None
    """The model that it adapts."""
    max_model_len: int | None
    """Tokens that a prompt and its answer may have together; null: not known."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]
