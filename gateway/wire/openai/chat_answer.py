"""OpenAI's whole answer of a chat completion, as structs, and one that is collected of deltas.

Knows no stream.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from gateway.generation_events import FinishReason, PromptLogprob, TextDelta, TokenInfo
from gateway.ids import uuid7
from gateway.wire.openai.chat import CompletionUsage

CALL_ID_CHARS = 24


class ChoiceLogprobs(msgspec.Struct):
    content: list[TokenInfo]
    refusal: None = None


class AnswerFunction(msgspec.Struct):
    name: str
    arguments: str


class AnswerCall(msgspec.Struct, kw_only=True):
    id: str
    type: str = "function"
    function: AnswerFunction


class AnswerMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    """null: it thought or called, and said nothing."""
    refusal: None = None
    reasoning_content: str | None | UnsetType = UNSET
    """Not OpenAI's: what a model that reasons thought; null: nothing, in vLLM's dialect."""
    tool_calls: list[AnswerCall] | UnsetType = UNSET
    function_call: AnswerFunction | None | UnsetType = UNSET
    """The one call of who offers `functions`."""
    annotations: None | UnsetType = UNSET
    """OpenAI's, as the next, which no answer here has: null in vLLM's dialect."""
    audio: None | UnsetType = UNSET


class AnswerChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | None | UnsetType = UNSET
    """vLLM's, as the next ones: of who names `return_token_ids`; null: who declines them."""


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[AnswerChoice]
    usage: CompletionUsage
    service_tier: str | None
    system_fingerprint: str | None
    prompt_token_ids: list[int] | None | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None | UnsetType = UNSET


def reason_of(reason: FinishReason, calls_function: bool) -> FinishReason:
    """Return why an answer is over, as who knows `function_call` alone is told."""
    return "function_call" if calls_function and reason == "tool_calls" else reason


def call_id() -> str:
    """Return a new id of a call, as long as OpenAI's."""
    return f"call_{uuid7().hex[-CALL_ID_CHARS:]}"


class ChoiceCollector:
    """Collects one choice, delta by delta."""

    def __init__(self, *, calls_function: bool = False, speaks_vllm: bool = False) -> None:
        """`calls_function`: a call is told in the older form. `speaks_vllm`: a message has all that
        vLLM's has, whether or not there is some."""
        self._calls_function = calls_function
        self._speaks_vllm = speaks_vllm
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._names: list[str] = []
        self._arguments: list[list[str]] = []
        self._logprobs: list[TokenInfo] = []
        self._token_ids: list[int] | None | UnsetType = UNSET
        self._finish_reason: FinishReason | None = None

    def name_token_ids(self) -> None:
        """Leave a place for ids that were declined, or that there are none of."""
        self._token_ids = None

    def add(self, delta: TextDelta) -> None:
        self._texts.append(delta.text)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        for call in delta.calls:
            if call.name is not None:
                self._names.append(call.name)
                self._arguments.append([])
            self._arguments[call.index].append(call.arguments)
        if delta.logprobs:
            self._logprobs += delta.logprobs
        if delta.token_ids is not None:
            self._token_ids = [*(self._token_ids or ()), *delta.token_ids]
        if delta.finish_reason is not None:
            self._finish_reason = reason_of(delta.finish_reason, self._calls_function)

    def choice(self, index: int) -> AnswerChoice:
        return AnswerChoice(
            index=index,
            message=self._message(),
            logprobs=ChoiceLogprobs(self._logprobs) if self._logprobs else None,
            finish_reason=self._finish_reason,
            token_ids=self._token_ids,
        )

    def _message(self) -> AnswerMessage:
        message = self._openais()
        if not self._speaks_vllm:
            return message
        message.content = message.content or ""
        for name in ("reasoning_content", "function_call", "annotations", "audio"):
            if getattr(message, name) is UNSET:
                setattr(message, name, None)
        if message.tool_calls is UNSET:
            message.tool_calls = []
        return message

    def _openais(self) -> AnswerMessage:
        text = "".join(self._texts)
        if not (self._reasoning or self._names):
            return AnswerMessage(content=text)
        thought = "".join(self._reasoning) if self._reasoning else UNSET
        if self._calls_function and self._names:
            return AnswerMessage(
                content=text or None,
                reasoning_content=thought,
                function_call=AnswerFunction(self._names[0], "".join(self._arguments[0])),
            )
        calls = [
            AnswerCall(id=call_id(), function=AnswerFunction(name, "".join(arguments)))
            for name, arguments in zip(self._names, self._arguments, strict=True)
        ]
        return AnswerMessage(
            content=text or None, reasoning_content=thought, tool_calls=calls or UNSET
        )
