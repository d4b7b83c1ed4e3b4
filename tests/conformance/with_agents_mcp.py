"""openai-agents' MCP client, with the SDK's OAuth provider: from a 401 to a tool's result. In the
environment of `make clients`. Prints the URL to open, reads the URL that came back from stdin,
prints what it got as JSON."""

import asyncio
import json
import sys
from urllib.parse import parse_qs, urlsplit

from agents.mcp import MCPServerStreamableHttp
from mcp.client.auth import OAuthClientProvider
from mcp.shared.auth import AuthorizationCodeResult, OAuthClientMetadata


class Storage:
    tokens = client = None

    async def get_tokens(self):
        return self.tokens

    async def set_tokens(self, tokens):
        self.tokens = tokens

    async def get_client_info(self):
        return self.client

    async def set_client_info(self, client):
        self.client = client


async def redirect(url):
    print(url, flush=True)


async def callback():
    answer = await asyncio.to_thread(sys.stdin.readline)
    found = {name: each[0] for name, each in parse_qs(urlsplit(answer.strip()).query).items()}
    return AuthorizationCodeResult(
        code=found["code"], state=found.get("state"), iss=found.get("iss")
    )


async def main(resource, redirectUri, tool):
    storage = Storage()
    metadata = {"redirect_uris": [redirectUri], "client_name": "Agent"}
    provider = OAuthClientProvider(
        server_url=resource,
        client_metadata=OAuthClientMetadata.model_validate(metadata),
        storage=storage,
        redirect_handler=redirect,
        callback_handler=callback,
    )
    params = {"url": resource, "auth": provider, "timeout": 60}
    async with MCPServerStreamableHttp(params=params, client_session_timeout_seconds=60) as server:
        tools = [each.name for each in await server.list_tools()]
        result = await server.call_tool(tool, {})
    said = {"refused": storage.client is not None, "tools": tools, "text": result.content[0].text}
    print(json.dumps({**said, "scope": storage.tokens.scope}))


if __name__ == "__main__":
    asyncio.run(main(**json.loads(sys.argv[1])))
