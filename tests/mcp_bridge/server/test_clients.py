"""The official client, of either era, before servers of either era: all that there is to ask."""

from __future__ import annotations

import asyncio
from typing import Any

import mcp_types as types
import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError

from tests.mcp_bridge.fixture_data import OTHER_TOOLS, PLAIN, PNG, ROUNDS
from tests.mcp_bridge.processes import Eras

pytestmark = pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")


class Person:
    """A person who answers what servers ask."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.logged: list[Any] = []
        self.told: asyncio.Queue[Any] = asyncio.Queue()

    async def elicit(self, context: Any, params: Any) -> types.ElicitResult:
        self.asked.append(params.message)
        return types.ElicitResult(action="accept", content={"name": "Ann", "ok": True})

    async def sample(self, context: Any, params: Any) -> types.CreateMessageResult:
        self.asked.append(params.messages[0].content.text)
        said = types.TextContent(type="text", text="Paris")
        return types.CreateMessageResult(role="assistant", content=said, model="m")

    async def roots(self, context: Any) -> types.ListRootsResult:
        self.asked.append("roots")
        return types.ListRootsResult(roots=[types.Root(uri="file:///here")])

    async def log(self, params: Any) -> None:
        self.logged.append(params.data)

    async def hear(self, message: Any) -> None:
        await self.told.put(message)


@pytest.fixture
def person() -> Person:
    return Person()


@pytest.fixture(params=["legacy", "auto"])
def client(request: pytest.FixtureRequest, eras: Eras, person: Person) -> Client:
    """Not entered yet: it wants to be left by the task that entered it."""
    return Client(
        eras.first.url,
        mode=request.param,
        elicitation_callback=person.elicit,
        sampling_callback=person.sample,
        list_roots_callback=person.roots,
        logging_callback=person.log,
        log_level="info",
        message_handler=person.hear,
        read_timeout_seconds=20,
    )


def is_modern(client: Client) -> bool:
    return client.session.protocol_version == "2026-07-28"


async def test_both_eras_are_spoken_to_clients(client: Client, request: Any) -> None:
    async with client:
        assert is_modern(client) == ("auto" in request.node.name)
        assert client.server_info.name == "tollgate"
        assert client.instructions == "For tests."


async def test_lists_are_the_servers(client: Client) -> None:
    async with client:
        tools = (await client.list_tools()).tools
        assert {tool.name for tool in tools} == {*PLAIN, *OTHER_TOOLS, *ROUNDS}
        assert len((await client.list_resources()).resources) == 3
        assert len((await client.list_resource_templates()).resource_templates) == 1
        assert len((await client.list_prompts()).prompts) == 5


async def test_results_are_the_servers(client: Client) -> None:
    async with client:
        image = await client.call_tool("test_image_content", {})
        assert image.content[0].data == PNG  # type: ignore[union-attr]
        failed = await client.call_tool("test_error_handling", {})
        assert failed.is_error
        prompt = await client.get_prompt("test_prompt_with_arguments", {"arg1": "a", "arg2": "b"})
        assert "arg1='a'" in prompt.messages[0].content.text  # type: ignore[union-attr]
        found = await client.read_resource("test://template/7/data")
        assert '"id": "7"' in found.contents[0].text  # type: ignore[union-attr]
        reference = types.PromptReference(type="ref/prompt", name="test_prompt_with_arguments")
        completed = await client.complete(reference, {"name": "arg1", "value": "par"})
        assert completed.completion.values == ["paris", "park", "party"]


async def test_errors_are_those_of_the_clients_era(client: Client) -> None:
    async with client:
        with pytest.raises(MCPError) as missing:
            await client.read_resource("test://nowhere")
        assert missing.value.code == (-32602 if is_modern(client) else -32002)
        assert missing.value.data == {"uri": "test://nowhere"}
        with pytest.raises(MCPError, match="Unknown tool"):
            await client.call_tool("no_such_tool", {})


async def test_progress_and_log_come_before_the_result(client: Client, person: Person) -> None:
    async with client:
        seen: list[float] = []

        async def progress(done: float, total: float | None, message: str | None) -> None:
            seen.append(done)

        await client.call_tool("test_tool_with_progress", {}, progress_callback=progress)
        assert seen == [0, 50, 100]
        if not is_modern(client):
            await client.set_logging_level("info")
        await client.call_tool("test_tool_with_logging", {})
        assert person.logged[-1] == "Tool execution completed" and len(person.logged) == 3


@pytest.mark.parametrize("name", [*ROUNDS, "test_elicitation", "test_sampling"])
async def test_what_a_server_asks_the_client_answers(
    client: Client, person: Person, name: str
) -> None:
    """Whichever way it is asked there, and asked here."""
    async with client:
        arguments = {"message": "Who?", "prompt": "Where?"}
        result = await client.call_tool(name, arguments)
        assert not result.is_error
        asked = {
            "test_elicitation": ["Who?"],
            "test_sampling": ["Where?"],
            "test_input_required_result_multiple_inputs": [
                "Generate a greeting",
                "What is your name?",
                "roots",
            ],
            "test_input_required_result_multi_round": [
                "Step 1: What is your name?",
                "Step 2: What is your favorite color?",
            ],
        }.get(name)
        if asked is not None:
            assert sorted(person.asked) == asked
        assert person.asked


async def test_a_prompt_may_ask_too(client: Client, person: Person) -> None:
    async with client:
        found = await client.get_prompt("test_input_required_result_prompt")
        assert "Ann" in found.messages[0].content.text  # type: ignore[union-attr]
        assert person.asked == ["What context should the prompt use?"]


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_nobody_is_asked_for_what_they_cannot(eras: Eras, mode: Any) -> None:
    async with Client(eras.first.url, mode=mode, read_timeout_seconds=20) as client:
        with pytest.raises(MCPError):
            await client.call_tool("test_missing_capability", {})
        with pytest.raises(MCPError):
            await client.call_tool("test_sampling", {"prompt": "?"})


async def test_changes_are_told(client: Client, person: Person) -> None:
    async with client:
        if is_modern(client):
            async with client.listen(
                tools_list_changed=True, resource_subscriptions=["test://watched-resource"]
            ) as subscription:
                await client.call_tool("test_trigger_tool_change", {})
                await client.call_tool("test_trigger_resource_update", {})
                heard = {type(await anext(subscription)).__name__ for _ in range(2)}
            assert heard == {"ToolsListChanged", "ResourceUpdated"}
            return
        await client.subscribe_resource("test://watched-resource")
        wanted = {"notifications/tools/list_changed", "notifications/resources/updated"}
        while wanted:
            # The stream of a session is opened behind the client's back: it is there some time.
            await client.call_tool("test_trigger_tool_change", {})
            await client.call_tool("test_trigger_resource_update", {})
            try:
                async with asyncio.timeout(60):
                    while wanted:
                        wanted.discard(getattr(await person.told.get(), "method", ""))
            except TimeoutError:
                continue
