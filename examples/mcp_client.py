"""Lists and calls the tools of all MCP servers behind the gateway, with the official MCP client."""

import asyncio
import os

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client


async def main() -> None:
    url = os.environ["ANTHROPIC_BASE_URL"] + "/mcp"
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    async with (
        httpx2.AsyncClient(headers=headers) as http,
        Client(streamable_http_client(url, http_client=http)) as client,
    ):
        for tool in (await client.list_tools()).tools:
            print(f"{tool.name}: {tool.description}")
        result = await client.call_tool("library__find_book", {"title": "Dune"})
        print(result.content[0].text)


asyncio.run(main())
