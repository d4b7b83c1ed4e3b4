"""Makes a tool loop of a chat completion that names MCP servers among its tools. Its body is read
as strictly as one for our own engine, whatever serves its model: its prompt grows here."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from gateway.generate_request import AnswerHeader, GenerateRequest
from gateway.inference.calls import RequestContext, to_call
from gateway.inference.services import GenerationServices
from gateway.request_errors import BadField, UnknownField
from gateway.tools.loop import LoopCall, ToolLoops
from gateway.tools.servers import known_servers
from gateway.wire.openai.from_chat import from_openai
from gateway.wire.openai.to_chat import ChatEncoder, to_openai
from gateway.wire.openai_responses.looped_chat import ChatSteps
from gateway.wire.openai_responses.mcp_tools import McpChoice, McpTool
from gateway.wire.shared.refusals import check_values, decode, to_bad_value, unsupported
from gateway.wire.surfaces import AnswerFormat

T = TypeVar("T")
ID_PREFIX = "chatcmpl-"
KIND = "mcp"
_AT_TOOL = re.compile(r"(?<![\w.])tools\[(\d+)\]")


class _Tools(msgspec.Struct):
    tools: Any = None


_tools_decoder = msgspec.json.Decoder(_Tools)
_any_decoder = msgspec.json.Decoder()


def names_servers(body: bytes) -> bool:
    """Return whether a body names servers; what cannot be read is refused elsewhere."""
    if b'"mcp"' not in body:
        return False
    try:
        tools = _tools_decoder.decode(body).tools
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    listed = tools if isinstance(tools, list) else []
    return any(isinstance(tool, dict) and tool.get("type") == KIND for tool in listed)


def to_loop(
    services: GenerationServices, loops: ToolLoops | None, context: RequestContext
) -> LoopCall:
    """Raises: BadField, UnknownModel, MissingScope."""
    check_values(context.body)
    fields = decode(_any_decoder, context.body)
    tools = [read_tool(each, index) for index, each in enumerate(fields["tools"])]
    servers = known_servers(loops, context.principal, tools)
    assert loops is not None
    for index, tool in enumerate(tools):
        if isinstance(tool, McpTool) and tool.require_approval != "never":
            raise unsupported(
                f"tools[{index}].require_approval",
                "has to be 'never' in chat completions: /v1/responses asks for approvals",
            )
    choice = read_choice(fields.get("tool_choice"), tools)
    generate = read_without(fields, tools)
    if generate.n != 1:
        raise unsupported("n", "has to be 1 where tools of servers are called")
    refuse_of_one_prompt(generate)
    made: list[ChatSteps] = []

    def encoder(request: GenerateRequest, heading: AnswerHeader) -> ChatEncoder:
        made.append(ChatSteps(request, heading))
        return to_openai(request, heading)

    call = to_call(services, AnswerFormat(id_prefix=ID_PREFIX, encoder=encoder), context, generate)
    return LoopCall(
        loops=loops,
        call=call,
        steps=made[0],
        servers=servers,
        choice=choice,
        parallel=fields.get("parallel_tool_calls") is not False,
        new_meter=context.meter.again,
    )


def read_tool(found: Any, index: int) -> Any:
    """Read a tool of a server; those of other kinds stay as they are."""
    if not (isinstance(found, dict) and found.get("type") == KIND):
        return found
    return convert(found, McpTool, f"$.tools[{index}]")


def read_choice(found: Any, tools: list[Any]) -> Any:
    """Read a choice of a server's tool; others stay as they are. Raises: BadField."""
    if not (isinstance(found, dict) and found.get("type") == KIND):
        return found
    choice = convert(found, McpChoice, "$.tool_choice")
    choice.check(tools)
    return choice


def convert(found: dict[str, Any], kind: type[T], place: str) -> T:
    """Convert a value. Raises: BadField, by the place in the body."""
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        text = text.replace("`$", f"`{place}", 1) if "`$" in text else f"{text} - at `{place}`"
        raise to_bad_value(text) from error


def read_without(fields: dict[str, Any], tools: list[Any]) -> GenerateRequest:
    """Read the request without its servers; its tools keep the places where the client wrote them.
    Raises: BadField."""
    places = [index for index, tool in enumerate(tools) if not isinstance(tool, McpTool)]
    rest = {**fields, "tools": [tools[index] for index in places]}
    choice = rest.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == KIND:
        del rest["tool_choice"]
    if not places:
        del rest["tools"]
        rest.pop("parallel_tool_calls", None)
        if isinstance(choice, str):
            del rest["tool_choice"]
    try:
        generate = from_openai(msgspec.json.encode(rest), "engine")
    except BadField as error:
        if error.param is not None:
            error.param = placed(error.param, places)
            error.message = placed(error.message, places)
            error.args = (error.message,)
        if isinstance(error, UnknownField):
            error.place = placed(error.place, places)
        raise
    return msgspec.structs.replace(generate, has_tools=True)


def refuse_of_one_prompt(generate: GenerateRequest) -> None:
    """Refuse what is said of one prompt and one answer: a loop has several. Raises: BadField."""
    prompt = generate.prompt
    assert prompt is not None
    for param, asked in (
        ("return_token_ids", prompt.return_token_ids),
        ("prompt_logprobs", prompt.prompt_logprobs is not None),
        ("echo", prompt.echo),
        ("continue_final_message", prompt.continues),
        ("stream_options.continuous_usage_stats", generate.continuous_usage),
    ):
        if asked:
            raise unsupported(param, "not supported where tools of servers are called")


def placed(text: str, places: list[int]) -> str:
    def back(found: re.Match[str]) -> str:
        index = int(found[1])
        return f"tools[{places[index]}]" if index < len(places) else found[0]

    return _AT_TOOL.sub(back, text)
