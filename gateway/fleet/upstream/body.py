"""A `ChatPrompt` as the body of an OpenAI chat completion: how a surface that is not OpenAI's asks
an upstream.

Pure. What a plain OpenAI-compatible upstream does not know is refused by its name, never left out;
what a client did not say is not said there either. Breakpoints are a wish to pay for a cache that
none of them is known to keep: they mean nothing here, as to a model of our own whose cache contract
is not explicit.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.protocol import Grammar
from gateway.generate_request import (
    ChatPrompt,
    GenerateRequest,
    MaxTokensField,
    OutputForm,
    Tool,
    ToolUse,
)
from gateway.request_errors import UnsupportedField
from gateway.wire.constraints.to_grammar import ANY_OBJECT

UNKNOWN_THERE = (
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos"),
    *("stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs"),
    *("logprob_token_ids", "return_token_ids", "return_tokens_as_token_ids", "echo"),
    *("add_generation_prompt", "template_kwargs"),
)
CLIENTS_NAMES = {"template_kwargs": "chat_template_kwargs"}
ALIKE = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed")
"""Fields of the same name and meaning."""
FORM_NAME = "answer"
"""The schema name that is sent if the client gave none; the field is required."""
UNSAID = ChatPrompt(messages=[])


def to_chat_body(
    request: GenerateRequest, max_tokens_field: MaxTokensField, *, hints_effort: bool = False
) -> dict[str, Any]:
    """Return the body. `hints_effort`: a mere hint at how much to think is told, too. Raises
    UnsupportedField."""
    prompt = request.prompt
    assert prompt is not None
    refuse_unknown(prompt)
    body: dict[str, Any] = {
        "model": request.model,
        "messages": [to_message(each) for each in prompt.messages],
    }
    if request.stream:
        body["stream"] = True
    if request.n > 1:
        body["n"] = request.n
    if prompt.max_tokens is not None:
        body[max_tokens_field] = prompt.max_tokens
    for name in ALIKE:
        value = getattr(prompt, name)
        if value != getattr(UNSAID, name):
            body[name] = value
    if prompt.stop:
        body["stop"] = list(prompt.stop)
    if prompt.logit_bias:
        body["logit_bias"] = {str(key): bias for key, bias in prompt.logit_bias.items()}
    if prompt.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": prompt.logprobs}
    if prompt.reasoning_effort is not None and (hints_effort or not prompt.effort_is_hint):
        body["reasoning_effort"] = prompt.reasoning_effort
    if prompt.form is not None:
        body["response_format"] = to_response_format(prompt.form)
    if prompt.tools is not None:
        body |= to_tools(prompt.tools)
    return body


def refuse_unknown(prompt: ChatPrompt) -> None:
    for name in UNKNOWN_THERE:
        if getattr(prompt, name) != getattr(UNSAID, name):
            raise unknown_there(CLIENTS_NAMES.get(name, name))
    if prompt.continues:
        raise unknown_there(prompt.path_of(len(prompt.messages) - 1))


def unknown_there(param: str) -> UnsupportedField:
    message = f"Unsupported parameter: '{param}' is not supported by this model's upstream."
    return UnsupportedField(message, param=param)


def to_message(message: dict[str, Any]) -> dict[str, Any]:
    """A result has its call's id; the name that templates want beside it is not OpenAI's."""
    if message["role"] != "tool":
        return message
    return {name: value for name, value in message.items() if name != "name"}


def to_response_format(form: OutputForm) -> dict[str, Any]:
    if form.grammar == ANY_OBJECT:
        return {"type": "json_object"}
    if form.grammar.kind != "json_schema":
        raise unknown_there(form.param)
    schema = {"name": FORM_NAME, "schema": decoded(form.grammar, form.param), "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def decoded(grammar: Grammar, param: str) -> Any:
    try:
        return msgspec.json.decode(grammar.text)
    except msgspec.DecodeError as error:
        message = f"Invalid value for '{param}': not JSON."
        raise UnsupportedField(message, param=param) from error


def to_tools(use: ToolUse) -> dict[str, Any]:
    found: dict[str, Any] = {"tools": [to_tool(each) for each in use.tools]}
    if len(use.forced) == 1:
        found["tool_choice"] = {"type": "function", "function": {"name": use.forced[0]}}
    elif use.forced:
        found["tool_choice"] = "required"
    if not use.parallel and len(use.forced) != 1:
        found["parallel_tool_calls"] = False
    return found


def to_tool(tool: Tool) -> dict[str, Any]:
    if not tool.strict:
        return tool.shown
    return {**tool.shown, "function": {**tool.shown["function"], "strict": True}}
