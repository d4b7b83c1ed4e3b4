"""An MCP server on the official SDK, as a process of its own, that answers what the conformance
suite asks of one: `python -m tests.mcp_bridge.fixture_server --port 0 --era both`.

It says `listening on PORT` once it does. With `--era 2025-11-25` or `2026-07-28` it refuses the
other era as a server does that has never heard of it. In both eras its tools ask for the same:
over the open call in the older, by `input_required` in the newer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import mcp_types as types
import uvicorn
from mcp.server.lowlevel import Server
from mcp.server.lowlevel.server import NotificationOptions
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.subscriptions import (
    InMemorySubscriptionBus,
    ListenHandler,
    PromptsListChanged,
    ResourceUpdated,
    ServerEvent,
    ToolsListChanged,
)
from mcp.server.transport_security import TransportSecuritySettings
from mcp.server.validation import validate_sampling_tools
from mcp.shared.exceptions import MCPError
from mcp.shared.message import ServerMessageMetadata

from tests.mcp_bridge.fixture_data import (
    ADD,
    DEFAULTS_SCHEMA,
    ENUMS_SCHEMA,
    NOTHING,
    OTHER_TOOLS,
    PERSON_SCHEMA,
    PLAIN,
    PNG,
    PROMPT_ROUND,
    ROUNDS,
    SCHEMAS,
    STATELESS,
    sample,
    text,
    wish_with_tools,
)
from tests.mcp_bridge.fixture_parts import MODERN, Log, of_one_era, sealed, unsealed

PAUSE_S = 0.02
CAPABILITIES = {
    "elicitation/create": "elicitation",
    "sampling/createMessage": "sampling",
    "roots/list": "roots",
}
RESULTS: dict[str, Any] = {
    "elicitation/create": (types.ElicitRequest, types.ElicitResult),
    "sampling/createMessage": (types.CreateMessageRequest, types.CreateMessageResult),
    "roots/list": (types.ListRootsRequest, types.ListRootsResult),
}
Asked = dict[str, dict[str, Any]]
Answers = dict[str, dict[str, Any]]


class InputRequired(Exception):
    def __init__(self, asked: Asked, state: str | None) -> None:
        self.result = types.InputRequiredResult.model_validate(
            {"inputRequests": asked, "requestState": state}
        )


class Fixture:
    def __init__(self) -> None:
        self.bus = InMemorySubscriptionBus()
        self.connections: weakref.WeakSet[Any] = weakref.WeakSet()
        self.subscribed: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
        self.calls: Counter[str] = Counter()
        self.special: dict[str, Callable[..., Awaitable[Any]]] = {
            "test_tool_with_logging": self.log,
            "test_tool_with_progress": self.progress,
            "test_error_handling": self.fail,
            "test_sampling": self.sample,
            "test_sampling_with_tools": self.sample_with_tools,
            "test_elicitation": self.elicit,
            "test_elicitation_sep1034_defaults": self.elicit_defaults,
            "test_elicitation_sep1330_enums": self.elicit_enums,
            "test_streaming_elicitation": self.elicit,
            "test_reconnection": self.reconnect,
            "test_missing_capability": self.need_sampling,
            "test_trigger_tool_change": self.tools_changed,
            "test_trigger_prompt_change": self.prompts_changed,
            "test_trigger_resource_update": self.resource_changed,
            "test_count_calls": self.count,
            "test_headers": self.headers,
        }

    # What it has.

    async def list_tools(self, ctx: Any, params: Any) -> types.ListToolsResult:
        names = [*PLAIN, *OTHER_TOOLS, *ROUNDS]
        tools = [
            {
                "name": name,
                "description": f"The fixture's {name}",
                "inputSchema": SCHEMAS.get(name, NOTHING),
            }
            for name in names
        ]
        return types.ListToolsResult.model_validate({"tools": tools})

    async def call_tool(self, ctx: Any, params: types.CallToolRequestParams) -> Any:
        arguments = params.arguments or {}
        try:
            if params.name in PLAIN:
                content: Any = PLAIN[params.name]
            elif params.name in ROUNDS:
                answers = await self.ask_rounds(ctx, params)
                content = [text(f"state-ok: {json.dumps(answers, sort_keys=True)}")]
            elif params.name in self.special:
                content = await self.special[params.name](ctx, params, arguments)
            else:
                raise MCPError(types.INVALID_PARAMS, f"Unknown tool: {params.name}")
        except InputRequired as wanting:
            return wanting.result
        if isinstance(content, types.CallToolResult):
            return content
        return types.CallToolResult.model_validate({"content": content})

    async def list_resources(self, ctx: Any, params: Any) -> types.ListResourcesResult:
        found = [
            {
                "uri": f"test://{name}",
                "name": name,
                "description": f"The fixture's {name}",
                "mimeType": kind,
            }
            for name, kind in (
                ("static-text", "text/plain"),
                ("static-binary", "image/png"),
                ("watched-resource", "text/plain"),
            )
        ]
        return types.ListResourcesResult.model_validate({"resources": found})

    async def list_templates(self, ctx: Any, params: Any) -> types.ListResourceTemplatesResult:
        template = {
            "uriTemplate": "test://template/{id}/data",
            "name": "template",
            "description": "The fixture's template",
            "mimeType": "application/json",
        }
        return types.ListResourceTemplatesResult.model_validate({"resourceTemplates": [template]})

    async def read_resource(self, ctx: Any, params: Any) -> types.ReadResourceResult:
        uri = str(params.uri)
        found: dict[str, Any] = {"uri": uri, "mimeType": "text/plain"}
        if uri == "test://static-text":
            found["text"] = "This is the content of the static text resource."
        elif uri == "test://watched-resource":
            found["text"] = "This is watched."
        elif uri == "test://static-binary":
            found |= {"mimeType": "image/png", "blob": PNG}
        elif uri.startswith("test://template/") and uri.endswith("/data"):
            id_ = uri.split("/")[3]
            told = {"id": id_, "templateTest": True, "data": f"Data for ID: {id_}"}
            found |= {"mimeType": "application/json", "text": json.dumps(told)}
        else:
            code = types.INVALID_PARAMS if ctx.protocol_version == MODERN else -32002
            raise MCPError(code, "Resource not found", {"uri": uri})
        return types.ReadResourceResult.model_validate({"contents": [found]})

    async def list_prompts(self, ctx: Any, params: Any) -> types.ListPromptsResult:
        wants = {
            "test_simple_prompt": (),
            "test_prompt_with_arguments": ("arg1", "arg2"),
            "test_prompt_with_embedded_resource": ("resourceUri",),
            "test_prompt_with_image": (),
            "test_input_required_result_prompt": (),
        }
        prompts = [
            {
                "name": name,
                "description": f"The fixture's {name}",
                "arguments": [{"name": each, "required": True} for each in arguments],
            }
            for name, arguments in wants.items()
        ]
        return types.ListPromptsResult.model_validate({"prompts": prompts})

    async def get_prompt(self, ctx: Any, params: types.GetPromptRequestParams) -> Any:
        given = params.arguments or {}
        said: list[Any]
        if params.name == "test_simple_prompt":
            said = [text("This is a simple prompt for testing.")]
        elif params.name == "test_prompt_with_arguments":
            told = f"arg1='{given.get('arg1')}', arg2='{given.get('arg2')}'"
            said = [text(f"Prompt with arguments: {told}")]
        elif params.name == "test_prompt_with_embedded_resource":
            resource = {"uri": given.get("resourceUri"), "mimeType": "text/plain"}
            resource["text"] = "Embedded resource content for testing."
            said = [{"type": "resource", "resource": resource}]
            said.append(text("Please process the embedded resource above."))
        elif params.name == "test_prompt_with_image":
            said = [{"type": "image", "data": PNG, "mimeType": "image/png"}]
            said.append(text("Please analyze the image above."))
        elif params.name == "test_input_required_result_prompt":
            try:
                answers = await self.ask(ctx, params, PROMPT_ROUND, None)
            except InputRequired as wanting:
                return wanting.result
            said = [text(f"In this context: {json.dumps(answers)}")]
        else:
            raise MCPError(types.INVALID_PARAMS, f"Unknown prompt: {params.name}")
        messages = [{"role": "user", "content": each} for each in said]
        return types.GetPromptResult.model_validate({"messages": messages})

    async def complete(self, ctx: Any, params: Any) -> types.CompleteResult:
        values = ["paris", "park", "party"]
        return types.CompleteResult.model_validate(
            {"completion": {"values": values, "total": 150, "hasMore": False}}
        )

    # What it asks.

    async def ask(self, ctx: Any, params: Any, asked: Asked, state: str | None) -> Answers:
        """The answers to all of them. Raises: InputRequired, in the newer era, until they are
        there."""
        if ctx.protocol_version == MODERN:
            given = params.input_responses or {}
            if not all(key in given for key in asked):
                raise InputRequired(asked, state)
            return {
                key: each if isinstance(each, dict) else each.model_dump(mode="json", by_alias=True)
                for key, each in given.items()
                if key in asked
            }

        async def ask_one(request: dict[str, Any]) -> dict[str, Any]:
            kind, result = RESULTS[request["method"]]
            if "tools" in request["params"]:
                result = types.CreateMessageResultWithTools
            answered = await ctx.session.send_request(
                kind.model_validate(request),
                result,
                metadata=ServerMessageMetadata(related_request_id=ctx.request_id),
            )
            said: dict[str, Any] = answered.model_dump(
                mode="json", by_alias=True, exclude_none=True
            )
            return said

        answers = await asyncio.gather(*(ask_one(request) for request in asked.values()))
        return dict(zip(asked, answers, strict=True))

    async def ask_rounds(self, ctx: Any, params: Any) -> Answers:
        rounds = [dict(each) for each in ROUNDS[params.name]]
        if params.name == "test_input_required_result_capabilities":
            declared = self.declared(ctx)
            rounds = [
                {
                    key: each
                    for key, each in rounds[0].items()
                    if declared.get(CAPABILITIES[each["method"]]) is not None
                }
            ]
        if ctx.protocol_version != MODERN:
            answers: Answers = {}
            for asked in rounds:
                answers |= await self.ask(ctx, params, asked, None)
            return answers
        done = 0
        if params.request_state is not None:
            done = int(unsealed(params.request_state).partition(":")[2])
        elif params.name not in STATELESS:
            raise InputRequired(rounds[0], sealed(f"{params.name}:0"))
        answers = await self.ask(ctx, params, rounds[done], sealed(f"{params.name}:{done}"))
        if done + 1 < len(rounds):
            raise InputRequired(rounds[done + 1], sealed(f"{params.name}:{done + 1}"))
        return answers

    @staticmethod
    def declared(ctx: Any) -> dict[str, Any]:
        found = ctx.session.client_capabilities
        dumped: dict[str, Any] = {} if found is None else found.model_dump(by_alias=True)
        return dumped

    # Its tools.

    async def log(self, ctx: Any, params: Any, arguments: Any) -> Any:
        for said in ("Tool execution started", "Tool processing data", "Tool execution completed"):
            await ctx.session.send_log_message("info", said, related_request_id=ctx.request_id)
            await asyncio.sleep(PAUSE_S)
        return [text("It has logged.")]

    async def progress(self, ctx: Any, params: Any, arguments: Any) -> Any:
        for done in (0, 50, 100):
            await ctx.session.report_progress(done, 100)
            await asyncio.sleep(PAUSE_S)
        return [text("It has reported.")]

    async def fail(self, ctx: Any, params: Any, arguments: Any) -> Any:
        said = text("This tool intentionally returns an error for testing")
        return types.CallToolResult.model_validate({"content": [said], "isError": True})

    async def sample(self, ctx: Any, params: Any, arguments: Any) -> Any:
        """As often as `times`, all at once."""
        one = sample(str(arguments.get("prompt")))
        asked = {f"sample{n or ''}": one for n in range(int(arguments.get("times", 1)))}
        answers = await self.ask(ctx, params, asked, None)
        return [text(f"LLM response: {answers['sample']['content']['text']}")]

    async def sample_with_tools(self, ctx: Any, params: Any, arguments: Any) -> Any:
        """It adds for the model, until that has an answer; what was said is in its state."""
        validate_sampling_tools(ctx.session.client_capabilities, [types.Tool(**ADD)], None)
        said: list[Any] = [{"role": "user", "content": text(str(arguments.get("prompt")))}]
        if params.request_state is not None:
            said = json.loads(unsealed(params.request_state))
        while True:
            asked = wish_with_tools(said)
            answers = await self.ask(ctx, params, {"turn": asked}, sealed(json.dumps(said)))
            answer = types.CreateMessageResultWithTools.model_validate(answers["turn"])
            calls = [each for each in answer.content_as_list if each.type == "tool_use"]
            if answer.stop_reason != "toolUse":
                return [text(f"LLM response: {answers['turn']['content']['text']}")]
            content = answers["turn"]["content"]
            results = [
                {
                    "type": "tool_result",
                    "toolUseId": each.id,
                    "content": [text(str(each.input["a"] + each.input["b"]))],
                }
                for each in calls
            ]
            said += [
                {"role": "assistant", "content": content},
                {"role": "user", "content": results},
            ]
            params = params.model_copy(update={"input_responses": None})

    async def elicit(self, ctx: Any, params: Any, arguments: Any) -> Any:
        return await self.form(ctx, params, str(arguments.get("message")), PERSON_SCHEMA)

    async def elicit_defaults(self, ctx: Any, params: Any, arguments: Any) -> Any:
        return await self.form(ctx, params, "Defaults", DEFAULTS_SCHEMA)

    async def elicit_enums(self, ctx: Any, params: Any, arguments: Any) -> Any:
        return await self.form(ctx, params, "Enums", ENUMS_SCHEMA)

    async def form(self, ctx: Any, params: Any, message: str, schema: Any) -> Any:
        request = {
            "method": "elicitation/create",
            "params": {"mode": "form", "message": message, "requestedSchema": schema},
        }
        answer = (await self.ask(ctx, params, {"form": request}, None))["form"]
        told = json.dumps(answer.get("content"))
        return [text(f"User response: action={answer['action']}, content={told}")]

    async def reconnect(self, ctx: Any, params: Any, arguments: Any) -> Any:
        if ctx.close_sse_stream is not None:
            await ctx.close_sse_stream()
        await asyncio.sleep(5 * PAUSE_S)
        return [text("It came after the stream was closed.")]

    async def need_sampling(self, ctx: Any, params: Any, arguments: Any) -> Any:
        if self.declared(ctx).get("sampling") is None:
            needed = {"requiredCapabilities": {"sampling": {}}}
            raise MCPError(types.MISSING_REQUIRED_CLIENT_CAPABILITY, "Needs sampling", needed)
        return [text("It can sample.")]

    async def headers(self, ctx: Any, params: Any, arguments: Any) -> Any:
        return [text(json.dumps(dict(ctx.request.headers)))]

    async def count(self, ctx: Any, params: Any, arguments: Any) -> Any:
        """How often it was called with this key; with `wait`, once somebody has answered."""
        key = str(arguments.get("key"))
        self.calls[key] += not (arguments.get("peek") or params.input_responses)
        if arguments.get("wait"):
            await self.form(ctx, params, "Go on?", PERSON_SCHEMA)
        return [text(str(self.calls[key]))]

    # What changes.

    async def tell(self, event: ServerEvent, notification: types.ServerNotification) -> Any:
        await self.bus.publish(event)
        said = notification.model_dump(by_alias=True, mode="json", exclude_none=True)
        for connection in list(self.connections):
            await connection.notify(said["method"], said.get("params"))
        return [text("It has changed.")]

    async def tools_changed(self, ctx: Any, params: Any, arguments: Any) -> Any:
        return await self.tell(ToolsListChanged(), types.ToolListChangedNotification())

    async def prompts_changed(self, ctx: Any, params: Any, arguments: Any) -> Any:
        return await self.tell(PromptsListChanged(), types.PromptListChangedNotification())

    async def resource_changed(self, ctx: Any, params: Any, arguments: Any) -> Any:
        uri = "test://watched-resource"
        await self.bus.publish(ResourceUpdated(uri=uri))
        for connection, uris in list(self.subscribed.items()):
            if uri in uris:
                await connection.send_resource_updated(uri)
        return [text("It was updated.")]

    async def subscribe(self, ctx: Any, params: Any) -> types.EmptyResult:
        self.subscribed.setdefault(ctx.session._connection, set()).add(str(params.uri))
        return types.EmptyResult()

    async def unsubscribe(self, ctx: Any, params: Any) -> types.EmptyResult:
        self.subscribed.get(ctx.session._connection, set()).discard(str(params.uri))
        return types.EmptyResult()

    async def set_level(self, ctx: Any, params: Any) -> types.EmptyResult:
        return types.EmptyResult()

    async def remember(self, ctx: Any, call_next: Any) -> Any:
        if ctx.protocol_version != MODERN:
            self.connections.add(ctx.session._connection)
        return await call_next(ctx)

    def server(self) -> Server[Any]:
        server: Server[Any] = Server(
            "fixture",
            version="1.0.0",
            instructions="For tests.",
            on_list_tools=self.list_tools,
            on_call_tool=self.call_tool,
            on_list_resources=self.list_resources,
            on_list_resource_templates=self.list_templates,
            on_read_resource=self.read_resource,
            on_subscribe_resource=self.subscribe,
            on_unsubscribe_resource=self.unsubscribe,
            on_subscriptions_listen=ListenHandler(self.bus),
            on_list_prompts=self.list_prompts,
            on_get_prompt=self.get_prompt,
            on_completion=self.complete,
            on_set_logging_level=self.set_level,
        )
        server.middleware.append(self.remember)
        changes = NotificationOptions(True, True, True)
        plain = server.create_initialization_options
        server.create_initialization_options = (  # type: ignore[method-assign]
            lambda notification_options=None, *rest, **more: plain(changes, *rest, **more)
        )
        return server


def application(era: str) -> Any:
    hosts = ["127.0.0.1:*", "localhost:*"]
    manager = StreamableHTTPSessionManager(
        Fixture().server(),
        event_store=Log(),
        retry_interval=100,
        security_settings=TransportSecuritySettings(
            enable_dns_rebinding_protection=True,
            allowed_hosts=hosts,
            allowed_origins=[f"http://{host}" for host in hosts],
        ),
    )
    served = of_one_era(manager.asgi_app, era)

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        async with manager.run():
            yield

    from starlette.applications import Starlette
    from starlette.routing import Mount

    return Starlette(routes=[Mount("/", app=served)], lifespan=lifespan)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--era", choices=["both", "2025-11-25", MODERN], default="both")
    given = parser.parse_args()
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # asyncio's own loop does not ask for it, as uvloop does: each answer's body waited 40 ms.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.bind(("127.0.0.1", given.port))
        bound.listen()
        print(f"listening on {bound.getsockname()[1]}", flush=True)
        config = uvicorn.Config(application(given.era), log_level="warning", access_log=False)
        asyncio.run(uvicorn.Server(config).serve([bound]))


if __name__ == "__main__":
    main()
