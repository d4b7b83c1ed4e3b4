"""vLLM's `/tokenize` and `/detokenize`, as structs and conversions: texts or conversations to
tokens, and back.

Knows no tokenizer.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.json import Decoder

from gateway.generate_request import Dialect, ToTokenize, WrittenIds
from gateway.request_errors import BadField
from gateway.wire.constraints.format_structs import StrictStruct
from gateway.wire.constraints.tool_structs import Tools
from gateway.wire.openai.chat import (
    MAX_MESSAGES,
    AnyMessages,
    ChatCompletionRequest,
    Message,
    ModelName,
    TemplateKwargs,
    Unsupported,
)
from gateway.wire.openai.from_chat import to_generate, with_any_roles
from gateway.wire.openai.plain_prompts import check_other_values, to_ids
from gateway.wire.shared.refusals import TokenId, check_values, decode

OF_CONVERSATIONS = (
    *("messages", "tools", "add_generation_prompt", "continue_final_message"),
    "chat_template_kwargs",
)
"""The fields that cannot stand beside a text."""


class TokenizeRequest(StrictStruct):
    """The body of `/tokenize`: either `prompt` or `messages`."""

    model: ModelName = ""
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    """Unless said, of a text alone: a conversation's template wrote its own."""
    add_generation_prompt: bool | None = None
    """Unless said, yes."""
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    return_token_strs: bool | None = None

    chat_template: Unsupported = None
    mm_processor_kwargs: Unsupported = None


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    """Tokens that a prompt and its answer may have together."""
    tokens: list[int]
    token_strs: list[str] | None = None
    """Each token as the vocabulary writes it, if it was requested."""


class DetokenizeRequest(StrictStruct, kw_only=True):
    model: ModelName = ""
    tokens: list[TokenId]


class SentTokens(DetokenizeRequest, kw_only=True):
    """The same as it is decoded: the ids are read later."""

    tokens: msgspec.Raw  # type: ignore[assignment]


class DetokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str


class TokenizerQuery(StrictStruct):
    """The query of `GET /tokenizer_info`."""

    model: ModelName = ""


class AddedToken(msgspec.Struct, frozen=True, kw_only=True):
    content: str
    lstrip: bool
    normalized: bool
    rstrip: bool
    single_word: bool
    special: bool


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tells what the model's `tokenizer_config.json` says, and the chat template in use."""

    tokenizer_class: str
    model_max_length: int | None = None
    """As the folder has it; how long a prompt may be here, `/v1/models` says."""
    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    pad_token: str | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    add_prefix_space: bool | None = None
    clean_up_tokenization_spaces: bool | None = None
    split_special_tokens: bool | None = None
    additional_special_tokens: list[str]
    added_tokens_decoder: dict[str, AddedToken]
    """By token id."""
    chat_template: str | None = None


class AnyRoleTokenizeRequest(TokenizeRequest):
    """The same with messages of roles that OpenAI does not know."""

    messages: AnyMessages | None = None  # type: ignore[assignment]


_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_any_role_decoder: Decoder[TokenizeRequest] = Decoder(AnyRoleTokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(SentTokens)


def from_tokenize(body: bytes, dialect: Dialect = "engine") -> ToTokenize:
    """Raises BadField."""
    check_values(body)
    if dialect == "vllm":
        asked = with_any_roles(_tokenize_decoder, _any_role_decoder, body)
    else:
        asked = decode(_tokenize_decoder, body)
    check_one(asked)
    special, with_texts = asked.add_special_tokens, bool(asked.return_token_strs)
    if asked.messages is None:
        return ToTokenize(
            text=asked.prompt, add_special_tokens=special is not False, with_texts=with_texts
        )
    return ToTokenize(
        chat=to_generate(
            ChatCompletionRequest(
                model=asked.model,
                messages=asked.messages,
                tools=asked.tools,
                add_generation_prompt=asked.add_generation_prompt,
                continue_final_message=asked.continue_final_message,
                chat_template_kwargs=asked.chat_template_kwargs,
            )
        ).prompt,
        add_special_tokens=bool(special),
        with_texts=with_texts,
    )


def check_one(asked: TokenizeRequest) -> None:
    """Raises BadField."""
    if asked.prompt is None and asked.messages is None:
        raise BadField("Missing required parameter: 'prompt' or 'messages'.", param="prompt")
    if asked.prompt is None:
        return
    for name in OF_CONVERSATIONS:
        if getattr(asked, name) is not None:
            raise BadField(f"'{name}' cannot stand beside 'prompt'.", param=name)


def from_detokenize(body: bytes) -> WrittenIds:
    """Raises BadField."""
    check_other_values(body, "tokens")
    return to_ids(bytes(decode(_detokenize_decoder, body).tokens), "tokens")
