"""Names what traces say: by OpenTelemetry's semantic conventions, and where those have no name, by
ours.

Those of generative AI and of MCP are of release 0.1.0 of `semantic-conventions-genai`, all others
of release 1.44 of `semantic-conventions`. Nothing else spells such a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Stable: HTTP, errors, servers (semantic-conventions 1.44).
CLIENT_ADDRESS: Final = "client.address"
ERROR_TYPE: Final = "error.type"
HTTP_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_STATUS: Final = "http.response.status_code"
SERVICE_INSTANCE: Final = "service.instance.id"
SERVICE_NAME: Final = "service.name"
SERVICE_VERSION: Final = "service.version"

# In development: generative AI (semantic-conventions-genai 0.1.0, client-inference).
OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
"""Seconds."""
CACHE_READ_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
CACHE_WRITE_TOKENS: Final = "gen_ai.usage.cache_write.input_tokens"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
"""The tokens that were read, the cached ones among them."""
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
"""The tokens that were written, those of reasoning among them."""
REASONING_TOKENS: Final = "gen_ai.usage.reasoning.output_tokens"
TOOL_NAME: Final = "gen_ai.tool.name"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
"""As JSON, by the schema of the conventions; of projects that store contents alone."""
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
"""The same."""
TOOL_DEFINITIONS: Final = "gen_ai.tool.definitions"
"""The same."""

CHAT, COMPLETION, EMBEDDINGS, EXECUTE_TOOL = "chat", "text_completion", "embeddings", "execute_tool"
OPERATIONS: Mapping[str, str] = {"completions": COMPLETION, "embeddings": EMBEDDINGS}
"""Operations by the last part of a route, where it is not `chat`."""
OPENAI: Final = "openai"
"""The provider of an upstream: it speaks OpenAI's API, whoever runs it."""

# In development: MCP (semantic-conventions-genai 0.1.0, mcp).
MCP_METHOD: Final = "mcp.method.name"
TOOLS_CALL: Final = "tools/call"
PROMPTS_GET: Final = "prompts/get"
PROMPT_NAME: Final = "gen_ai.prompt.name"
MCP_VERSION: Final = "mcp.protocol.version"
RESOURCE_URI: Final = "mcp.resource.uri"
"""Without its query: nothing of an argument's content is in a span."""
JSONRPC_ID: Final = "jsonrpc.request.id"
RPC_STATUS: Final = "rpc.response.status_code"
NETWORK_PROTOCOL, NETWORK_TRANSPORT = "network.protocol.name", "network.transport"
HTTP, TCP = "http", "tcp"
"""How clients reach the bridge. `mcp.session.id` is told to nobody: who has it may go on with the
session's streams."""

# Ours.
TOLLGATE: Final = "tollgate"
"""The service, and the provider of models that run here."""
REQUEST_ID: Final = "tollgate.request.id"
KEY_ID: Final = "tollgate.key.id"
ORG_ID: Final = "tollgate.org.id"
MODEL: Final = "tollgate.model"
WORK: Final = "tollgate.work"
"""Names work that is done for no HTTP request of its own: `background`, the rest of a response
after its answer; `batch`, a line of one. It is linked to the request that made it."""
COST: Final = "tollgate.cost_pico_usd"
TTFT_MS: Final = "tollgate.ttft_ms"
QUEUE_MS: Final = "tollgate.queue_ms"
REPLICA: Final = "tollgate.replica"
ROUTE_CHOICE: Final = "tollgate.route.choice"
"""Why a replica was chosen, and what was predicted of each."""
ATTEMPT_ID: Final = "tollgate.attempt.id"
MCP_SERVER: Final = "tollgate.mcp.server"
OUTCOME: Final = "tollgate.outcome"
CONTENT_CUT: Final = "tollgate.content.cut"
"""Texts are missing that are beyond the bound."""
KEPT_FOR: Final = "tollgate.kept_for"
"""Why the trace is recorded: `sampled`, `error` or `slow`."""
UNFINISHED: Final = "tollgate.unfinished"
LEFT_OUT: Final = "tollgate.stages.left_out"
CACHE_EVENT: Final = "tollgate.cache"
CACHE_CAUSE: Final = "tollgate.cache.cause"
CACHE_FOUND: Final = "tollgate.cache.found"
"""The cached tokens of a prompt by where they were found: `pool 896, tier 128, fetched 1024`."""
UNCACHED_TOKENS: Final = "tollgate.cache.uncached_tokens"
COST_EVENT: Final = "tollgate.cost"
COST_LINE: Final = "tollgate.cost.{component}_pico_usd"


def operation_of(route: str) -> str:
    """Name the operation of a route, `/v1/chat/completions`."""
    if route.endswith("/chat/completions"):
        return CHAT
    return OPERATIONS.get(route.rpartition("/")[2], CHAT)
