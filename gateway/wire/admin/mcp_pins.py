"""/v1/admin/mcp/servers: what clients write and read.

Texts of a server stand here as it wrote them; in differences and findings, what nobody would see is
made visible.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_SHOWN = 500
"""Changes on one page."""
MAX_NAMES = 1_000
OfferedName = Annotated[str, Meta(min_length=1, max_length=1024)]
Names = Annotated[list[OfferedName], Meta(min_length=1, max_length=MAX_NAMES)]


class McpServerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The health of a server as the answering worker sees it for this organization; the worst of
    several users."""

    object: str = "mcp.server.health"
    state: Literal["closed", "resting", "trying"]
    """`closed`: asked as usual. `resting`: it failed and is not asked. `trying`: one call is on its
    way, and decides."""
    connections: int
    """One of the organization, or one a user where each is shown as who they are."""
    failures_in_a_row: int
    last_failure: str | None
    """A code. None: nothing has failed since it last answered."""
    failing_since: int | None
    """Unix seconds, as all times."""
    last_answer_at: int | None
    retry_at: int | None
    """Nobody asks the server before this moment."""


class McpServer(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "mcp.server"
    name: str
    state: Literal["trusted", "approved", "unapproved"]
    """Without asking it. `trusted`: the operator has all that it offers shown."""
    transport: Literal["http", "sse", "stdio", "openapi"]
    approved: int
    """Tools, prompts, resources, instructions and how it is reached."""
    era: Literal["auto", "2026-07-28", "2025-11-25"]
    """The revision in which it is asked. `auto`: that of each client, where it speaks that."""
    recheck_s: float
    """How long its offer is taken for what it was when it was last asked. 0: it is asked before
    each call."""
    health: McpServerHealth | None = None
    """None: this worker has not asked it for the organization yet."""


class McpServers(msgspec.Struct, frozen=True, kw_only=True):
    """All MCP servers."""

    object: str = "list"
    data: list[McpServer]


class McpDifference(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    """A JSON pointer."""
    was: str | None
    now: str | None


class McpFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A finding: something that looks like an attack."""

    code: str
    path: str
    severity: str
    detail: str


class McpChange(msgspec.Struct, frozen=True, kw_only=True):
    state: Literal["new", "changed", "renamed", "removed"]
    kind: Literal["tool", "prompt", "resource", "resource_template", "instructions", "launch"]
    name: str
    was: str | None
    """The digest of what is approved."""
    now: str | None
    """The digest of what is offered, and what approving it keeps."""
    differences: list[McpDifference]
    findings: list[McpFinding]


class McpNeverShown(msgspec.Struct, frozen=True, kw_only=True):
    """An item that stays hidden whatever is approved."""

    kind: str
    name: str
    path: str
    reason: str


class McpServerOffer(msgspec.Struct, frozen=True, kw_only=True):
    """The items that a server offers now, beside those that are approved."""

    object: str = "mcp.server.offer"
    name: str
    state: Literal["trusted", "approved", "waiting", "unreachable"]
    problem: str | None
    """Why it cannot be asked."""
    approved: int
    waiting: int
    digest: str
    """The digest of all waiting changes, to the byte."""
    changes: list[McpChange]
    """A page of what waits."""
    next: str | None = None
    """The `after` of the next page; None: this is the last."""
    never: list[McpNeverShown]
    notes: list[str] = []
    """Say what was not looked at, and why."""


class McpOfferQuery(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`?after=CURSOR&limit=100`. `after`: the `next` of the page before, for which the server is
    not asked again."""

    after: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_SHOWN)] = MAX_SHOWN


class NamedOffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A choice of `all`, or of named items."""

    all: Literal[True] | None = None
    tools: Names | None = None
    prompts: Names | None = None
    instructions: Literal[True] | None = None

    @property
    def is_one(self) -> bool:
        names = (self.tools, self.prompts, self.instructions)
        return (self.all is None) != all(each is None for each in names)


class McpApproveBody(NamedOffer, frozen=True, kw_only=True):
    """An approval. `tools`, `prompts`, `instructions`: these, whatever they look like, and how the
    server is reached. `all`: whatever waits, but what looks like an attack."""


class McpRevokeBody(NamedOffer, frozen=True, kw_only=True):
    """A revocation. `all`: and how the server is reached, so that it is not dialled any more."""
