"""Prepares a body for an OpenAI-compatible upstream: it is sent everything but what would change
the bill.

Works on the decoded body. The fields that steer the gateway are checked here, because a wrong
reservation or a wrong stream would be ours; the rest is the upstream's to judge.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.generate_request import ServiceTier
from gateway.request_errors import BadField
from gateway.wire.openai.chat import MAX_CHOICES, MAX_MESSAGES, MAX_PARTS
from gateway.wire.shared.refusals import to_bad_value, unsupported

MAX_TOOLS = 10_000
MAX_TOKENS = 2**31 - 1

BILLED_OTHERWISE = {
    "web_search_options": "searches are charged by the call",
    "search_parameters": "searches are charged by the source",  # xAI
    "enable_search": "searches are charged by the call",  # Alibaba
    "search_options": "searches are charged by the call",  # Alibaba
    "plugins": "plugins are charged by the call",  # OpenRouter
    "compound_custom": "its tools are charged by the call",  # Groq
    "audio": "audio tokens have another price",
    "models": "another model has another price",  # OpenRouter's fallbacks
    "route": "another model has another price",  # OpenRouter
    "provider": "another provider has another price",  # OpenRouter
    "providerOptions": "another provider has another price",  # Vercel
    "preset": "it may name another model, provider or plugin",  # OpenRouter
    "transforms": "the prompt that is charged would be another",  # OpenRouter
    "fallbacks": "another model has another price",  # LiteLLM
    "context_window_fallbacks": "another model has another price",  # LiteLLM
    "content_policy_fallbacks": "another model has another price",  # LiteLLM
    "deferred": "what is fetched later is charged without being counted",  # xAI
    "speed": "another speed has another price",  # Anthropic
    "inference_geo": "another region has another price",  # Anthropic
    "best_of": "unseen choices are charged as well",  # vLLM
}
"""Refused by name unless null."""

OUR_TIERS: tuple[ServiceTier, ...] = ("priority", "fast", "flex")
"""Served by us, at our prices: an upstream hears nothing of them and serves what it always does.
Asked for its own it would charge otherwise, or otherwise than it was asked: some fall back."""
CONTINUOUS = "continuous_usage_stats"
OUR_FIELDS = ("priority", "stream_options")
PLAIN_TOOLS = ("function", "custom")
"""Tools that the client runs. Every other type is the upstream's own and has a fee."""
PLAIN_CACHE_TTLS = ("5m", "30m")
"""The lifetimes that a vendor's usual cache-write price stands for; longer ones cost more."""


class ForwardFields(msgspec.Struct, frozen=True):
    """The fields that the gateway itself needs to know."""

    model: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    n: int
    service_tier: ServiceTier | None
    cache_key: str | None
    has_tools: bool


def check_forward(body: Any) -> ForwardFields:
    """Raises BadField."""
    if not isinstance(body, dict):
        raise BadField("The request body must be a JSON object.")
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise BadField("you must provide a model parameter", param="model")
    check_messages(body.get("messages"))
    stream = optional_bool(body.get("stream"), "stream")
    include_usage, continuous = check_stream_options(body.get("stream_options"), stream)
    n = optional_int(body.get("n"), "n", MAX_CHOICES)
    for name in ("max_tokens", "max_completion_tokens"):
        optional_int(body.get(name), name, MAX_TOKENS)
    check_price(body)
    has_tools = bool(body.get("tools") or body.get("functions"))
    cache_key = optional_text(body.get("prompt_cache_key"), "prompt_cache_key")
    return ForwardFields(
        model, stream, include_usage, continuous, n or 1, service_tier(body), cache_key, has_tools
    )


def without_ours(body: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is honoured here and nothing for an upstream: our tiers, whose turn it is, and
    the usage that stands in each chunk."""
    hidden = {name for name in OUR_FIELDS if name in body}
    if body.get("service_tier") in OUR_TIERS:
        hidden.add("service_tier")
    if not hidden:
        return body
    sent = {name: value for name, value in body.items() if name not in hidden}
    options = body.get("stream_options")
    if isinstance(options, dict):
        kept = {name: value for name, value in options.items() if name != CONTINUOUS}
        sent["stream_options"] = kept
    return sent


def service_tier(body: dict[str, Any]) -> ServiceTier | None:
    """Return the tier; a wrong one is refused in the words of a model of our own. Raises
    BadField."""
    named = body.get("service_tier")
    if named is None:
        return None
    try:
        found: ServiceTier | None = msgspec.convert(named, ServiceTier | None)
    except msgspec.ValidationError as error:
        raise to_bad_value(f"{error} - at `$.service_tier`") from error
    return found


def check_messages(messages: Any) -> None:
    if messages is None:
        raise BadField("Missing required parameter: 'messages'.", param="messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "expected a non-empty array")
    if len(messages) > MAX_MESSAGES:
        raise invalid("messages", f"more than {MAX_MESSAGES}")
    num_parts = 0
    for position, message in enumerate(messages):
        param = f"messages[{position}]"
        if not isinstance(message, dict):
            raise invalid(param, "expected an object")
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise invalid(f"{param}.content", "expected a string or an array")
        parts = content if isinstance(content, list) else ()
        num_parts += len(parts)
        if num_parts > MAX_PARTS:
            raise invalid("messages", f"more than {MAX_PARTS} parts of content")
        for index, part in enumerate(parts):
            check_part(part, f"{param}.content[{index}]")


def check_part(part: Any, param: str) -> None:
    if not isinstance(part, dict):
        raise invalid(param, "expected an object")
    if part.get("type") == "input_audio":
        raise refused(f"{param}.type", "audio tokens have another price")
    for field in ("prompt_cache_breakpoint", "cache_control"):
        check_cache_ttl(part.get(field), f"{param}.{field}")


def check_stream_options(options: Any, stream: bool) -> tuple[bool, bool]:
    """Return whether the usage is asked for, and whether it is in every chunk. Raises BadField."""
    if options is None:
        return False, False
    if not isinstance(options, dict):
        raise invalid("stream_options", "expected an object")
    if not stream:
        raise BadField(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            param="stream_options",
        )
    included = optional_bool(options.get("include_usage"), "stream_options.include_usage")
    continuous = optional_bool(options.get(CONTINUOUS), f"stream_options.{CONTINUOUS}")
    return included, included and continuous


def check_price(body: dict[str, Any]) -> None:
    if not BILLED_OTHERWISE.keys().isdisjoint(body):
        for name, reason in BILLED_OTHERWISE.items():
            if body.get(name) is not None:
                raise refused(name, reason)
    modalities = body.get("modalities")
    if modalities is not None and modalities != ["text"]:
        raise refused("modalities", "only text has a price here")
    check_cache_ttl(body.get("prompt_cache_options"), "prompt_cache_options")
    check_cache_ttl(body.get("cache_control"), "cache_control")
    tools = body.get("tools")
    if isinstance(tools, list) and len(tools) > MAX_TOOLS:
        raise invalid("tools", f"more than {MAX_TOOLS}")
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        if not isinstance(tool, dict) or tool.get("type") not in PLAIN_TOOLS:
            raise refused(f"tools[{index}].type", "an upstream's own tool has a price of its own")
        check_cache_ttl(tool.get("cache_control"), f"tools[{index}].cache_control")


def check_cache_ttl(options: Any, param: str) -> None:
    if options is None:
        return
    if not isinstance(options, dict):
        raise invalid(param, "expected an object")
    ttl = options.get("ttl")
    if ttl is not None and ttl not in PLAIN_CACHE_TTLS:
        raise refused(f"{param}.ttl", "another lifetime has another price")


def optional_bool(value: Any, param: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise invalid(param, "expected a boolean")
    return bool(value)


def optional_text(value: Any, param: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise invalid(param, "expected a string")
    return value


def optional_int(value: Any, param: str, maximum: int) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise invalid(param, "expected an integer")
    if not 1 <= value <= maximum:
        raise invalid(param, f"expected 1 to {maximum}")
    return value


def invalid(param: str, reason: str) -> BadField:
    return BadField(f"Invalid value for '{param}': {reason}.", param=param)


def refused(param: str, reason: str) -> BadField:
    return unsupported(param, f"not supported: {reason}")
