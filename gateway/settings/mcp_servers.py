"""`[[mcp.servers]]` as far as its parts have to fit together: pure.

Names are checked for how they lie about where they lead when a server is dialled; here only what is
plainly written is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from gateway.net.egress_targets import (
    LOCALHOST,
    Forbidden,
    NearHosts,
    check_address,
    check_host,
    parse_target,
)
from gateway.settings.file import SettingsError, WrittenMcpOauth, WrittenMcpServer, explain

if TYPE_CHECKING:
    from mcp_bridge.upstream.audience import Audience
    from mcp_bridge.upstream.launch_spec import LaunchSpec

EXCHANGE = "token_exchange"
ENDPOINTS = ("authorization_endpoint", "token_endpoint")
KEEPS_NAMES = "identity"
"""The namespace of one server, whose names stay as they are (`mcp_bridge.server.bridge`)."""
OF_COMMANDS = (
    "args",
    "environment",
    "credential_names",
    "digests",
    "readable",
    "offline",
    "limits",
)
OF_URLS = ("transport", "network")
MCP_CALLS = "mcp"
"""The price book's entry for calls of servers that have no entry of their own."""


def priced_as(server: str) -> str:
    """Return the name of an MCP server's calls in the price book, on the bill and for limits."""
    return f"{MCP_CALLS}/{server}"


def check_mcp_servers(
    servers: Sequence[WrittenMcpServer], models: Collection[str], *, near: bool, drift: bool = True
) -> None:
    """Check all servers; near: this machine may be dialled, whatever a server says.

    `models`: names that are taken. `drift`: a process may fetch what is not pinned.
    Raises: SettingsError.
    """
    for taken in (MCP_CALLS, *(priced_as(each.name) for each in servers)) if servers else ():
        if taken in models:
            raise SettingsError(f"model: {taken!r} is the name of calls of MCP servers")
    names = [each.name for each in servers]
    for position, server in enumerate(servers):
        place = f"mcp.servers[{position}]"
        if server.name in names[:position]:
            raise SettingsError(f"{place}.name: {server.name!r} stands there twice")
        if server.openapi is not None and server.url is None:
            raise SettingsError(f"{place}.openapi: wants a url, where the API is asked")
        if (server.url is None) == (server.command is None):
            raise SettingsError(f"{place} ({server.name}): wants exactly one of url, command")
        _check_idle(place, server)
        _check_namespace(place, server, servers[:position])
        _check_sampling(f"{place}.sampling", server, models)
        _check_era(f"{place}.era", server)
        if server.openapi is not None or server.query_credentials:
            _check_openapi(place, server, near=near)
        _check_issuer_hosts(place, server)
        if server.oauth is not None:
            _check_oauth(place, server, near=near)
        if server.url is not None:
            _check_url(f"{place}.url", server.url, server.network, near=near)
        else:
            _check_launch(place, server, drift=drift)


def _check_idle(place: str, server: WrittenMcpServer) -> None:
    """Refuse settings that would do nothing."""
    plain = WrittenMcpServer(name=server.name)
    other = "command" if server.command is None else "url"
    for field in OF_COMMANDS if server.command is None else OF_URLS:
        if getattr(server, field) != getattr(plain, field):
            raise SettingsError(f"{place}.{field}: is for a server with a {other}")


def _check_namespace(
    place: str, server: WrittenMcpServer, before: Sequence[WrittenMcpServer]
) -> None:
    taken = [each.name for each in before if each.namespace == KEEPS_NAMES]
    if server.namespace == KEEPS_NAMES and taken:
        said = f"{KEEPS_NAMES!r} is for one server alone, and {taken[0]!r} is in it"
        raise SettingsError(f"{place}.namespace: {said}")


def _check_era(place: str, server: WrittenMcpServer) -> None:
    if server.era == "auto":
        return
    if server.openapi is not None:
        raise SettingsError(f"{place}: is not for a server with openapi")
    if server.transport == "sse" and server.era == "2026-07-28":
        raise SettingsError(f"{place}: transport = 'sse' is of the older revisions")


def _check_sampling(place: str, server: WrittenMcpServer, models: Collection[str]) -> None:
    by, model = server.sampling.by, server.sampling.model
    if (by == "engine") != (model is not None):
        raise SettingsError(f"{place}.model: is wanted for by = 'engine', and for nothing else")
    if model is not None and model not in models:
        raise SettingsError(f"{place}.model: {model!r} is no model of this file")


def _check_oauth(place: str, server: WrittenMcpServer, *, near: bool) -> None:
    """A browser is sent there with our state in hand: in the clear on this machine alone."""
    oauth = server.oauth
    assert oauth is not None
    if server.credential == "none" or server.url is None:
        raise SettingsError(f"{place}.oauth: is for a url with credential = 'user' or 'tenant'")
    endpoints = {field: getattr(oauth, field) for field in ENDPOINTS}
    hosts = issuer_hosts_of(server)
    if oauth.grant == EXCHANGE:
        if oauth.authorization_endpoint is not None:
            raise SettingsError(f"{place}.oauth.authorization_endpoint: nobody is sent there")
        if server.credential != "user":
            raise SettingsError(f"{place}.oauth.grant: is for credential = 'user'")
        if oauth.token_endpoint is None:
            raise SettingsError(f"{place}.oauth.token_endpoint: where tokens are exchanged")
        del endpoints["authorization_endpoint"]
    if None in endpoints.values():
        _check_known(place, oauth)
        return
    for field, url in endpoints.items():
        try:
            parse_target(url, allow_loopback=near, near=hosts)
        except Forbidden as error:
            raise SettingsError(f"{place}.oauth.{field}: {error}") from None


def issuer_hosts_of(server: WrittenMcpServer) -> NearHosts:
    """Return the hosts at which the authorization server of an MCP server may lie as near as
    itself: those that the operator named, and its own, which names its issuer."""
    if not server.issuer_hosts or server.url is None or server.network == "public":
        return {}
    try:
        own = urlsplit(server.url).hostname or ""
    except ValueError:
        return {}  # `_check_url` says so
    return dict.fromkeys((own, *(each.lower() for each in server.issuer_hosts)), server.network)


def _check_issuer_hosts(place: str, server: WrittenMcpServer) -> None:
    if not server.issuer_hosts:
        return
    if server.network == "public" or server.credential == "none":
        both = "network = 'private' or 'loopback' and a credential"
        raise SettingsError(f"{place}.issuer_hosts: is for a server with {both}")
    for position, host in enumerate(server.issuer_hosts):
        try:
            check_host(host.lower(), allow_loopback=True, allow_private=True)
        except Forbidden as error:
            raise SettingsError(f"{place}.issuer_hosts[{position}]: {error}") from None


def _check_known(place: str, oauth: WrittenMcpOauth) -> None:
    """Check a client whose endpoints are discovered: its secret goes to one issuer alone."""
    for field in (*ENDPOINTS, "auth_method", "scope", "resource"):
        if getattr(oauth, field) is not None:
            both = "authorization_endpoint and token_endpoint"
            raise SettingsError(f"{place}.oauth.{field}: is for an oauth with {both}")
    if oauth.client_secret_env is not None and oauth.issuer is None:
        raise SettingsError(f"{place}.oauth.issuer: whose the secret is must be said")


def _check_openapi(place: str, server: WrittenMcpServer, *, near: bool) -> None:
    """Check where an OpenAPI document is; its content is looked at when it is read: a document that
    cannot be used is its server's trouble alone."""
    from mcp_bridge.upstream.openapi.calls import checked_base_url
    from mcp_bridge.upstream.openapi.errors import BadDocument

    document = server.openapi
    if document is None:
        raise SettingsError(f"{place}.query_credentials: is for a server with openapi")
    if server.transport != "http":
        raise SettingsError(f"{place}.transport: is not for a server with openapi")
    assert server.url is not None
    try:
        checked_base_url(server.url)
    except BadDocument as error:
        raise SettingsError(f"{place}.url: {error.message}") from None
    if "://" in document:
        if not document.startswith(("http://", "https://")):
            raise SettingsError(f"{place}.openapi: an absolute path, or an http or https URL")
        _check_url(f"{place}.openapi", document, server.network, near=near)
    elif not document.startswith("/"):
        raise SettingsError(f"{place}.openapi: an absolute path, or an http or https URL")


def to_audience(server: WrittenMcpServer) -> Audience:
    from mcp_bridge.upstream.audience import Audience

    orgs, projects = server.orgs, server.projects
    pairs = (each.partition("/") for each in projects or ())
    return Audience(
        orgs=None if orgs is None else frozenset(orgs),
        projects=None if projects is None else frozenset((org, id_) for org, _, id_ in pairs),
    )


def to_launch(server: WrittenMcpServer) -> LaunchSpec:
    """Raises: BadLaunch, msgspec.ValidationError."""
    from mcp_bridge.upstream.launch_spec import LaunchSpec

    assert server.command is not None
    spec = msgspec.convert(
        {
            "name": server.name,
            "command": server.command,
            "args": server.args,
            "environment": server.environment,
            "credential_names": server.credential_names,
            "digests": server.digests,
            "readable": server.readable,
            "network": not server.offline,
            "limits": server.limits,
        },
        LaunchSpec,
    )
    spec.check()
    return spec


def _check_launch(place: str, server: WrittenMcpServer, *, drift: bool) -> None:
    from mcp_bridge.upstream.launch_errors import BadLaunch
    from mcp_bridge.upstream.stdio.package_refs import unpinned

    try:
        to_launch(server)
    except BadLaunch as error:
        raise SettingsError(f"{place}.{error.message}") from None
    except msgspec.ValidationError as error:
        raise SettingsError(explain(error, place)) from None
    assert server.command is not None
    for how in () if drift else unpinned(server.command, server.args):
        raise SettingsError(f"{place}.args: {how}; mcp.stdio.unpinned = 'warn' lets it pass")
    if server.credential_names and server.credential == "none":
        raise SettingsError(f"{place}.credential: whose fills the credential_names is not said")


def _check_url(place: str, url: str, network: str, *, near: bool) -> None:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        raise SettingsError(f"{place}: not a URL") from None
    if parts.username is not None or parts.password is not None:
        raise SettingsError(f"{place}: credentials belong into the vault, not into a URL")
    is_address = True
    try:
        ip_address(host)
    except ValueError:
        is_address = False
    is_near = host == LOCALHOST or (is_address and ip_address(host).is_loopback)
    if is_near and not near and network != "loopback":
        raise SettingsError(f"{place}: this machine is asked where it says network = 'loopback'")
    if is_address and not is_near:
        try:
            check_address(host, allow_private=network == "private")
        except Forbidden as error:
            hint = "" if network == "private" else "; the operator's own networks are 'private'"
            raise SettingsError(f"{place}: {error}{hint}") from None
    if parts.scheme != "https" and network == "public" and not is_near:
        raise SettingsError(f"{place}: http is for network = 'private' or 'loopback'")
