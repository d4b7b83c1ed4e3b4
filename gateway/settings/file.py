"""`tollgate.toml` as people write it: its tables, and what is said of a mistake in one.

Reads nothing: it is given what was read. Knows no default folder.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from billing.cache_contracts import ContractName
from billing.money import PICO_PER_USD, Pico
from billing.spool.sync_policy import SyncPolicy
from engine.text.output_parser.registry import FamilyName, ReasoningName
from foundation.structs import with_fields_of
from gateway.generate_request import MaxTokensField
from gateway.lanes import LaneDeadlines, LaneSlos, ModelSlos
from gateway.principal import Plan
from gateway.settings.cells import CELL_PATTERN, JOIN_PATTERN, PORT, CellConfig, JoinAddress
from gateway.settings.engine_counts import RANGE_PATTERN, EngineCount, JoinedEngines, StartedEngines
from gateway.settings.kubernetes import OBJECT_PATTERN, KubernetesConfig
from gateway.settings.planner import PlannerConfig

Flags = str | int | Path | None
"""The value of a command's option."""
NAME_PATTERN = r"^(?=.*\S)[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]{1,128}\Z"
Name = Annotated[str, Meta(pattern=NAME_PATTERN)]
PositiveInt = Annotated[int, Meta(ge=1, le=10**15)]
MAX_PATH_CHARS, MAX_PART_BYTES = 4096, 255
"""The bounds of Linux on a path and on a name in it."""
MAX_SHOWN_CHARS = 200
"""Characters of a mistake that are shown."""
ADAPTER_PATTERN = r"^(?=.*\S)[^=\x00-\x1f\x7f-\x9f]{1,128}\Z"
URL_PATTERN = (
    r"^https?://(?:[^/\s?#@]+@)?(?:\[[0-9A-Fa-f:.]+\]|[^/\s?#@:\[\]]+)"
    rf"(?::{PORT})?(?:[/?#][^\s\x00-\x1f\x7f]*)?\Z"
)
PUBLIC_URL_PATTERN = r"^https?://[^/\s?#@\\]+\Z"
ROOT_PATH_PATTERN = r"^(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*\Z"
REDIS_PATTERN = r"^(redis|rediss|unix)://."
MCP_PATTERN = r"^[a-z0-9](?:-?[a-z0-9]){0,23}\Z"
ORG_PATTERN = r"^org_[0-9A-Za-z]{1,64}\Z"
ORGS_PROJECT_PATTERN = r"^org_[0-9A-Za-z]{1,64}/proj_[0-9A-Za-z]{1,64}\Z"
VERSION_PATTERN = r"^sha256:[0-9a-f]{64}\Z"
ADDRESS_PATTERN = rf"^(unix:[^\x00-\x1f]+|tcp:[^\s\x00-\x1f]+:{PORT})\Z"
RAY_PATTERN = rf"^(auto|[^\s\x00-\x1f/]+:{PORT})\Z"
SENDER_PATTERN = r"^[^\x00-\x1f\x7f<>]*(<[^\s<>@]+@[^\s<>@]+>|[^\s<>@]+@[^\s<>@]+)$"
BUCKET_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{1,254}\Z"
PREFIX_PATTERN = r"^([A-Za-z0-9_-][A-Za-z0-9._-]{0,63}(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}){0,7})?\Z"
IN_WORDS = {
    repr(NAME_PATTERN): "1 to 128 characters that can be seen, on one line",
    repr(BUCKET_PATTERN): "the name of a bucket",
    repr(PREFIX_PATTERN): "names of letters, digits, '.', '_' and '-', with '/' between them",
    repr(ADAPTER_PATTERN): "a name of 1 to 128 characters on one line, without '='",
    repr(URL_PATTERN): "a URL such as 'http://127.0.0.1:9100/v1'",
    repr(PUBLIC_URL_PATTERN): "a URL without a path such as 'https://gateway.example.com'",
    repr(ROOT_PATH_PATTERN): "a path such as '/llm'",
    repr(REDIS_PATTERN): "a URL such as 'redis://127.0.0.1:6379/0'",
    repr(ORG_PATTERN): "an organization's id, org_...",
    repr(ORGS_PROJECT_PATTERN): "an organization's and its project's id, org_.../proj_...",
    repr(MCP_PATTERN): "1 to 24 of a-z, 0-9 and single hyphens between them",
    repr(CELL_PATTERN): "1 to 32 of a-z, 0-9 and single hyphens between them",
    repr(JOIN_PATTERN): "'tcp:host:port'",
    repr(RAY_PATTERN): "'auto' or 'host:port' of the cluster's head",
    repr(ADDRESS_PATTERN): "'unix:/path' or 'tcp:host:port'",
    repr(VERSION_PATTERN): "'sha256:' and 64 hex digits",
    repr(OBJECT_PATTERN): "a-z, 0-9 and hyphens between them",
    repr(RANGE_PATTERN): "a number such as 2, or a range such as '1..4'",
}
EngineTable = dict[str, Any]
"""`[engine]` or `[model.engine_options]` as written: any of `EngineOptions`. What a table does not
say, the other one may, so it is converted where both are known."""
AdapterName = Annotated[str, Meta(pattern=ADAPTER_PATTERN)]
"""The engine's command line names adapters NAME=PATH."""
Url = Annotated[str, Meta(pattern=URL_PATTERN)]
WeightsVersion = Annotated[str, Meta(pattern=VERSION_PATTERN)]
RootPath = Annotated[str, Meta(pattern=ROOT_PATH_PATTERN, max_length=255)]
TraceViewUrl = Annotated[
    str, Meta(pattern=r"^https?://[^\s{}\"'<>]+\{trace\}[^\s{}\"'<>]*$", max_length=2000)
]
PublicUrl = Annotated[str, Meta(pattern=PUBLIC_URL_PATTERN, max_length=255)]
McpName = Annotated[str, Meta(pattern=MCP_PATTERN)]
OrgId = Annotated[str, Meta(pattern=ORG_PATTERN)]
OrgsProject = Annotated[str, Meta(pattern=ORGS_PROJECT_PATTERN)]
EngineAddress = Annotated[str, Meta(pattern=ADDRESS_PATTERN)]
RayAddress = Annotated[str, Meta(pattern=RAY_PATTERN)]
MAX_SUITES = 20
Weight = Annotated[int, Meta(ge=1, le=1000)]
Concurrency = Annotated[int, Meta(ge=1, le=1024)]
"""As many as one gateway process keeps connections to an upstream (`fleet.upstream`)."""
FileBytes = Annotated[int, Meta(ge=1, le=1024**4)]
StoreTimeout = Annotated[float, Meta(ge=0.1, le=600)]


class SettingsError(Exception):
    """One line that names the key, the variable or the flag, and where it stands."""


class Strict(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the TOML file: what it does not know it refuses."""


class LogsConfig(Strict, frozen=True, kw_only=True):
    """`[logs]`: what the processes behind the supervisor log, each to a file of the home's `logs`,
    or to stderr where it runs alone."""

    format: Literal["json", "human"] = "json"
    """One object a line, or a line for a person."""
    access: bool = True
    """One line for each request that was answered."""
    client_address: bool = False
    """Such a line also tells where the request came from."""
    stdout: bool = False
    """The supervisor writes all lines to stdout, too, in the same format."""
    max_bytes: Annotated[int, Meta(ge=65_536, le=1 << 40)] = 32 * 1024 * 1024
    """A file that has outgrown it begins anew."""
    keep: Annotated[int, Meta(ge=0, le=99)] = 1
    """So many older ones stay beside it."""


class RequestsConfig(Strict, frozen=True, kw_only=True):
    """`[requests]`: the log of requests, which the console shows."""

    keep_days: Annotated[int, Meta(ge=0, le=3660)] = 30
    """How many days before today a row of each request is kept. 0: none are, only sums by hour and
    by day."""
    content_days: Annotated[int, Meta(ge=0, le=3660)] = 7
    """How many days the texts of requests are kept in projects with `store_content`, `keep_days` at
    the most. 0: none are stored or put into traces, whatever a project says."""

    @property
    def days_of_content(self) -> int:
        return min(self.content_days, self.keep_days)


class SpoolConfig(Strict, frozen=True, kw_only=True):
    """`[spool]`: how usage gets to disk before Postgres has it."""

    sync: SyncPolicy = "group"
    """`group`: an answer goes out once its usage is written, and a sync follows within 5 ms for
    all. The death of a process loses nothing; a power cut loses of the revenue what was answered in
    5 ms. `before_answer`: an answer waits for its sync, and neither loses anything."""


class FleetConfig(Strict, frozen=True, kw_only=True):
    """`[fleet]`: what several engines of a model do for each other, and who decides how many there
    are."""

    resume: bool = True
    """It goes on with another replica, or with the same one when it is back; else it ends with an
    error."""
    max_resumes: Annotated[int, Meta(ge=1, le=100)] = 3
    """How often one generation may."""
    drain_timeout_s: Annotated[float, Meta(ge=0, le=86_400)] = 600.0
    """A generation at an engine that is drained, or that other settings or the planner take away,
    goes on with another one of its model after that, if one serves."""
    hedge: Annotated[float, Meta(ge=0, le=0.2)] = 0.02
    """A request whose first token is late beside what was predicted is asked of another replica, if
    one is free, and the first to say something goes on. At most this share of requests; 0: none."""
    fetch: bool = True
    """An engine reads a prompt's beginning from another one of its model that has it, where that is
    quicker than computing it. Engines take it up when they are started."""
    join_listen: JoinAddress | None = None
    """The address to which engines of other machines come that join a model. None: none may."""
    join_bytes_per_s: Annotated[int, Meta(ge=0, le=10**12)] = 250_000_000
    """All engines together that join without files are sent so much of them. 0: they are not."""
    planner: PlannerConfig = PlannerConfig()


class MailConfig(Strict, frozen=True, kw_only=True):
    """`[mail]`: the SMTP server by which invites, password links and alerts are sent."""

    host: Annotated[str, Meta(min_length=1, max_length=253)]
    port: Annotated[int, Meta(ge=1, le=65_535)] = 587
    tls: Literal["starttls", "implicit", "none"] = "starttls"
    """`starttls` and `implicit` send nothing without it. `none`: for a server on this machine."""
    sender: Annotated[str, Meta(pattern=SENDER_PATTERN, max_length=320)]
    """The address that the messages come from, or `Name <address>`."""
    user: Annotated[str, Meta(min_length=1, max_length=320)] | None = None
    password_env: Name | None = None
    """The environment variable that holds the user's password."""


class TracesConfig(Strict, frozen=True, kw_only=True):
    """`[traces]`: which requests are recorded as traces, where their spans are sent, and who is
    told of their traces."""

    endpoint: Url
    """The URL of a collector that takes OTLP: for HTTP the base of its paths."""
    protocol: Literal["http", "grpc"] = "http"
    headers_env: Name | None = None
    """The environment variable that holds what the collector wants to be shown:
    `name=value,name=value`."""
    trust: Literal["none", "clients"] = "none"
    """`none`: a request begins a trace, with a link to the one that its client names. `clients`:
    it continues that one; so a tenant can write into another's trace whose id it knows."""
    ratio: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """How many of the requests are recorded whose clients record no trace."""
    client_sampled_per_s: Annotated[float, Meta(ge=0, le=100_000)] = 10.0
    """How many a second are recorded in one worker because their clients record them; beyond that
    they are sampled like all others."""
    slow_s: Annotated[float, Meta(gt=0, le=86_400)] | None = 10.0
    """A request whose first token comes later, or whose answer does that has no tokens, is recorded
    in any case, as one that fails is. None: how long it takes does not matter."""
    send_context_to: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()
    """The models of upstreams and MCP servers (`mcp/NAME`) that get `traceparent` and `tracestate`
    with what is asked of them; `*` and `mcp/*` are all."""
    view_url: TraceViewUrl | None = None
    """The address at which people look at a trace, with `{trace}` for its id: the console's page of
    a request leads there. None: the page has the id alone."""


class MetricsConfig(Strict, frozen=True, kw_only=True):
    """`[metrics]`: where `/metrics` is served, and health as well."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65_535)] | None = None
    """None: where everything else is. With a port, nothing else is served there, and `/metrics`
    nowhere else."""
    tenants: bool = False
    """Also count requests, tokens and spend by organization, a thousand of them by name. Wants
    `port`: no client reads what others spend."""


UnknownFields = Literal["refuse", "ignore"]
DialectName = Literal["openai", "vllm"]


class CompatConfig(Strict, frozen=True, kw_only=True):
    """`[compat]`: how far clients are let go that say what nobody here knows."""

    unknown_fields: UnknownFields = "refuse"
    """Fields of a request that are not in docs/fields.md: a 400 that names them, or as if they were
    not there, named in the answer's header `X-Tollgate-Ignored-Fields`."""
    dialect: DialectName = "openai"
    """The way our engines' chats and completions are asked and told where vLLM's servers do
    otherwise than OpenAI (docs/vllm.md)."""
    hosted_tools: Literal["leave_out", "refuse"] = "leave_out"
    """Tools in /v1/responses that a vendor's servers would run (`web_search`): not shown to the
    model, and named in the answer's `metadata`; or a 400."""


class RayConfig(Strict, frozen=True, kw_only=True):
    """`[model.ray]`: what Ray sets aside for each engine of the model that it runs."""

    engines: Annotated[int, Meta(ge=0, le=64)] | None = None
    """So many of those that may join; None: all."""
    cpus: Annotated[float, Meta(ge=0, le=4096)] = 1
    gpus: Annotated[float, Meta(ge=0, le=64)] = 0
    resources: dict[Name, Annotated[float, Meta(gt=0)]] = {}
    """The cluster's own resources, by their names."""
    path: Name | None = None
    """The model's folder on its nodes, or `org/name` on a hub. None: as here."""


class WrittenModel(Strict, frozen=True, kw_only=True):
    """`[[model]]` as people write it."""

    name: Name
    path: Path | None = None
    """A folder, `org/name` on a hub, or a source of the model cache, `hf:org/name@revision` or
    `s3://bucket/prefix`."""
    version: WeightsVersion | None = None
    """The digest that its files must have. None: any; those of the model cache stay what they were
    when they were first served."""
    revision: Name | None = None
    engine: EngineAddress | None = None
    insecure: bool | None = None
    """`engine` may be on another machine, though whoever is on the way there reads and asks all."""
    replicas: StartedEngines | None = None
    """So many engines are started for it; None: one is. 0: only with `joined`."""
    joined: JoinedEngines | None = None
    """So many engines of other machines may join it, of a range as the planner decides."""
    kubernetes: KubernetesConfig | None = None
    ray: RayConfig | None = None
    """The share of a node that each engine gets which Ray runs."""
    prefill: EngineCount | None = None
    decode: EngineCount | None = None
    """In place of `replicas`: so many engines compute prompts for the others, and so many go on."""
    engine_options: EngineTable = {}
    """The options of its engine, which override `[engine]`."""
    adapter: list[WrittenAdapter] = []
    cache_contract: ContractName | None = None
    chat_template: Path | None = None
    tool_call_parser: FamilyName | None = None
    reasoning_parser: ReasoningName | None = None
    upstream: Url | None = None
    upstream_model: Name | None = None
    api_key_env: Name | None = None
    api_key_file: Path | None = None
    max_concurrency: Concurrency | None = None
    max_tokens_field: MaxTokensField | None = None
    takes_reasoning_effort: bool | None = None
    replica: list[WrittenReplica] = []
    context_window: PositiveInt | None = None
    max_output_tokens: PositiveInt | None = None
    max_image_tokens: PositiveInt | None = None
    tokenizer: Path | None = None
    unknown_fields: UnknownFields | None = None
    """None: as `[compat]` has it, and so the next."""
    dialect: DialectName | None = None
    slo: ModelSlos = ModelSlos()
    """By lane; what it leaves out is as `[slo]` has it."""
    evaluations: Annotated[list[Name], Meta(max_length=MAX_SUITES)] = []
    """The suites that a version has to have passed before a rollout of this model begins."""


class WrittenAdapter(Strict, frozen=True, kw_only=True):
    """`[[model.adapter]]`. `path` and `version`: as of a model."""

    name: AdapterName
    path: Path | None = None
    version: WeightsVersion | None = None


class WrittenReplica(Strict, frozen=True, kw_only=True):
    """`[[model.replica]]`."""

    upstream: Url
    upstream_model: Name | None = None
    api_key_env: Name | None = None
    api_key_file: Path | None = None
    weight: Weight = 1
    max_concurrency: Concurrency | None = None
    max_tokens_field: MaxTokensField | None = None
    takes_reasoning_effort: bool | None = None


@with_fields_of(Plan, without=("name",))
class WrittenPlan(Strict, frozen=True, kw_only=True):
    """`[plan.NAME]`."""


class FileStoreConfig(Strict, frozen=True, kw_only=True):
    """`[file_store]`: an S3-compatible store for the content of files."""

    bucket: Annotated[str, Meta(pattern=BUCKET_PATTERN)]
    endpoint: Url | None = None
    """None: Amazon's of the region."""
    region: Name = "us-east-1"
    prefix: Annotated[str, Meta(pattern=PREFIX_PATTERN)] = "tollgate"
    """Before the names of all objects."""
    access_key_env: Name = "AWS_ACCESS_KEY_ID"
    secret_key_env: Name = "AWS_SECRET_ACCESS_KEY"
    """Environment variables that hold the credentials."""
    path_style: bool = True
    """The bucket stands in the path of a URL; else in the name of its host."""
    connect_timeout_s: StoreTimeout = 5.0
    timeout_s: StoreTimeout = 30.0
    """The deadline of one request, including its retries."""
    part_bytes: Annotated[int, Meta(ge=1024, le=64 * 1024 * 1024)] = 4 * 1024 * 1024
    """The part size of one object; each open upload and each reader holds one part in memory."""


class S3SourceConfig(Strict, frozen=True, kw_only=True):
    """`[model_cache.s3]`: how `s3://bucket/prefix` is reached."""

    endpoint: Url | None = None
    """None: Amazon's of the region."""
    region: Name = "us-east-1"
    access_key_env: Name | None = None
    secret_key_env: Name | None = None
    """Environment variables that hold the credentials. Neither: as Amazon's own clients find them:
    in AWS_ACCESS_KEY_ID and so on, or by the role of the machine."""
    anonymous: bool = False
    """Requests are not signed: for buckets that anybody may read."""
    path_style: bool = True
    """The bucket stands in the path of a URL; else in the name of its host."""
    connect_timeout_s: StoreTimeout = 5.0
    timeout_s: StoreTimeout = 60.0
    """The deadline of one request, which brings 16 MiB at most."""


class ModelCacheConfig(Strict, frozen=True, kw_only=True):
    """`[model_cache]`: where models' files are kept that come from a hub or S3, and how these are
    reached."""

    path: Path | None = None
    """A folder, which several homes of a machine may share. None: HOME/models."""
    max_bytes: Annotated[int, Meta(ge=1 << 20, le=1024**5)] = 256 * 1024**3
    """Models that no process uses are removed for what comes, the least recently used first."""
    hub_endpoint: Url | None = None
    """None: that of the variable HF_ENDPOINT, or huggingface.co."""
    hub_token_env: Name | None = None
    """The environment variable that holds the hub's token. None: as the hub's clients find it, in
    HF_TOKEN for one."""
    s3: S3SourceConfig = S3SourceConfig()


class BackupConfig(Strict, frozen=True, kw_only=True):
    """`[backup]`."""

    recipients: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(max_length=64)
    ] = []
    """The public keys (`age1...` or `ssh-...`) of those who can read what `tollgate backup create`
    writes, unless it is given `--to`."""


class WrittenMcpOauth(Strict, frozen=True, kw_only=True):
    """`[mcp.servers.oauth]`: what we are at a server's authorization server, so that people can let
    us in there. Without endpoints: what we are registered as there, and the rest is discovered.
    `grant`: that server takes our word for who calls instead (RFC 8693)."""

    client_id: Name
    grant: Literal["authorization_code", "token_exchange"] = "authorization_code"
    token_endpoint: Url | None = None
    authorization_endpoint: Url | None = None
    client_secret_env: Name | None = None
    """The environment variable that holds it."""
    auth_method: Literal["client_secret_basic", "client_secret_post"] | None = None
    """None: basic, or the first that both know."""
    issuer: Url | None = None
    scope: Name | None = None
    resource: Url | None = None


class WrittenMcpSampling(Strict, frozen=True, kw_only=True):
    """`[mcp.servers.sampling]`: who writes what the server wants of a model: whoever calls it, a
    model of ours on the bill of whoever calls it, or nobody."""

    by: Literal["caller", "engine", "off"] = "caller"
    model: Name | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 4096
    """The bound on one answer, whatever the server requests."""
    max_per_call: Annotated[int, Meta(ge=1, le=64)] = 8


class WrittenMcpServer(Strict, frozen=True, kw_only=True):
    """`[[mcp.servers]]`: asked where its URL says, or a process of this machine. `trust`: each
    thing that it offers has to be approved (`tollgate mcp approve`), or the operator vouches for
    "all" of it. `taints`: after a result of it, tools with side effects ask a person first.
    `network`: where it may lie, besides the public internet, which wants https. `credential`: whose
    it is shown, of the vault."""

    name: McpName
    url: Url | None = None
    transport: Literal["http", "sse"] = "http"
    """The transport of `url`: Streamable HTTP, or HTTP with SSE (revision 2024-11-05)."""
    openapi: Annotated[str, Meta(min_length=1, max_length=2048)] | None = None
    """A document, an absolute path or a URL, of the HTTP API at `url`."""
    query_credentials: list[Name] = []
    """The vault credentials of such an API that go in the query, not in headers."""
    namespace: McpName | None = None
    orgs: Annotated[list[OrgId], Meta(max_length=1000)] | None = None
    """With `projects`: whom it is there for; for all others there is no such server. Neither: for
    everybody."""
    projects: Annotated[list[OrgsProject], Meta(max_length=1000)] | None = None
    trust: Literal["pinned", "all"] = "pinned"
    taints: bool = False
    era: Literal["auto", "2026-07-28", "2025-11-25"] = "auto"
    """The revision in which it is asked. "auto": that of each client, where it speaks that."""
    recheck_s: Annotated[float, Meta(ge=0, le=3600)] = 1.0
    """How long its offer is taken for what it was when it was last asked. 0: it is asked before
    each call."""
    network: Literal["public", "private", "loopback"] = "public"
    credential: Literal["none", "tenant", "user"] = "none"
    issuer_hosts: Annotated[list[Name], Meta(max_length=16)] = []
    """The hosts that issue tokens for it and may also lie in `network`. Empty: public hosts
    only."""
    command: Name | None = None
    """An absolute path; the rest is of it alone."""
    args: list[str] = []
    environment: dict[str, str] = {}
    credential_names: list[str] = []
    """The environment variables that are filled from the vault."""
    oauth: WrittenMcpOauth | None = None
    digests: list[dict[str, str]] = []
    """Compared before each start: `kind` (file, tree, image), `path`, `sha256`; `reference`."""
    readable: list[str] = []
    offline: bool = False
    """In a sandbox: it reaches nobody."""
    sampling: WrittenMcpSampling = WrittenMcpSampling()
    limits: dict[str, PositiveInt] = {}


class WrittenMcpStdio(Strict, frozen=True, kw_only=True):
    """`[mcp.stdio]`: how servers that are processes are kept apart."""

    isolation: Literal["auto", "uid", "bubblewrap", "none"] = "auto"
    uids: Path = Path("/var/lib/tollgate/uids")
    """The registry of assigned uids, shared by all gateways of this host."""
    scratch: Path | None = None
    """The parent of the servers' scratch folders; None: under the home."""
    idle_stop_s: Annotated[float, Meta(ge=1, le=86_400)] = 300.0
    unpinned: Literal["warn", "refuse"] = "warn"
    """How to treat a server whose arguments name a package without an exact version, or an image
    without a digest."""


class WrittenToolLoop(Strict, frozen=True, kw_only=True):
    """`[mcp.loop]`: how far one request may go whose tools the gateway calls."""

    max_rounds: Annotated[int, Meta(ge=1, le=128)] = 16
    max_seconds: Annotated[float, Meta(gt=0, le=3600)] = 600.0
    """A round that has begun by then ends; calls are given up."""
    max_calls_per_round: Annotated[int, Meta(ge=1, le=128)] = 16
    max_parallel_calls: Annotated[int, Meta(ge=1, le=64)] = 8
    max_call_seconds: Annotated[float, Meta(gt=0, le=3600)] = 120.0
    max_result_bytes: Annotated[int, Meta(ge=64, le=8 << 20)] = 64 * 1024
    """The bound on one result as the model sees it; the rest is cut off."""
    max_tokens: PositiveInt = 2_000_000
    """Read and written, over all rounds."""
    max_cost_usd: Annotated[float, Meta(gt=0, le=1_000_000)] | None = None
    """Over all rounds and calls. None: what the tenant may spend."""

    @property
    def max_cost_pico(self) -> Pico | None:
        return None if self.max_cost_usd is None else round(self.max_cost_usd * PICO_PER_USD)


class WrittenMcp(Strict, frozen=True, kw_only=True):
    """`[mcp]`."""

    max_catalogue_tokens: Annotated[int, Meta(ge=0, le=10**15)] = 200_000
    """The token budget for listed tools behind one URL; beyond it, tools are searched instead. Four
    bytes of JSON count as one token."""
    search_model: Name | None = None
    """The embedding model for tool search, beside matching words."""
    scan_model: Name | None = None
    """The embedding model that compares what servers offer with prototypes of instructions, for the
    admin who approves it; the house pays."""
    loop: WrittenToolLoop = WrittenToolLoop()
    stdio: WrittenMcpStdio = WrittenMcpStdio()
    servers: Annotated[list[WrittenMcpServer], Meta(max_length=64)] = []


class Scalars(Strict, frozen=True, kw_only=True):
    """The settings that the file, the environment and the flags can all give."""

    home: Path = Path(".tollgate")
    host: Name = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """0: any free one."""
    public_url: PublicUrl | None = None
    """How clients reach the gateway, and the name under which it issues tokens (RFC 8414 `issuer`).
    None: the address that it listens on."""
    egress_to_loopback: bool = False
    """For development: the documents of clients and issuers may be on this machine, over http."""
    workers: Annotated[int, Meta(ge=1, le=256)] = 1
    database_url: str | None = None
    """For SQLAlchemy with asyncpg. None: an embedded Postgres under `home`."""
    redis_url: Annotated[str, Meta(pattern=REDIS_PATTERN)] | None = None
    """None: an embedded Valkey under `home`."""
    secret_key_file: Path | None = None
    """The versioned secret all gateways share (`gateway.secret`)."""
    ray: RayAddress | None = None
    """The Ray cluster on which engines run that join. None: somebody else starts those."""


class PlainSettings(Scalars, frozen=True, kw_only=True):
    """The settings that are the same as written and complete: a new one is a field here."""

    deadlines: LaneDeadlines = LaneDeadlines()
    """For the first token, by lane."""
    slo: LaneSlos = LaneSlos()
    compat: CompatConfig = CompatConfig()
    mcp: WrittenMcp = WrittenMcp()
    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks (CIDR) whose `X-Forwarded-For` or `Forwarded` is believed."""
    root_path: RootPath = ""
    """A path that a proxy leaves before ours (vLLM's `--root-path`): each route is served behind
    it, too. Addresses that are told lack it: they begin with `public_url`."""
    max_body_bytes: Annotated[int, Meta(ge=1024, le=1024**3)] = 16 * 1024 * 1024
    drain_timeout_s: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    """After SIGTERM: how long open streams may take to end by themselves."""
    stalled_reader_s: Annotated[float, Meta(ge=1, le=3600)] = 60.0
    """A client that takes nothing for so long is given up, and its connection closed."""
    stream_interval_s: Annotated[float, Meta(ge=0, le=1)] = 0.033
    """Tokens that an engine of ours makes within so long go out together, while it runs more than a
    few streams. 0: each goes out at once."""
    response_lifetime_days: Annotated[float, Meta(gt=0, le=3650)] = 30.0
    """How long what /v1/responses stores is kept."""
    max_file_bytes: FileBytes = 512 * 1024 * 1024
    """The bound on one file, uploaded or written by a batch."""
    max_org_file_bytes: FileBytes = 10 * 1024**3
    """The bound on all files of one organization."""
    max_batch_lines: Annotated[int, Meta(ge=1, le=1_000_000)] = 50_000
    max_batch_bytes: FileBytes = 200 * 1024 * 1024
    """The bound on the input of one batch."""
    batch_concurrency: Concurrency = 16
    """Requests of batches that one worker has under way."""
    file_store: FileStoreConfig | None = None
    """The store for the content of new files. None: Postgres."""
    model_cache: ModelCacheConfig = ModelCacheConfig()
    backup: BackupConfig = BackupConfig()
    fleet: FleetConfig = FleetConfig()
    cell: CellConfig | None = None
    """None: no home shares Postgres with this one."""
    max_disputed_in_a_row: Annotated[int, Meta(ge=0, le=1_000_000)] = 10
    """Answers of an upstream in a row that claim more tokens than the request can have used; then
    it is left alone for `disputed_rest_s`. 0: never."""
    disputed_rest_s: Annotated[float, Meta(gt=0, le=86_400)] = 60.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    logs: LogsConfig = LogsConfig()
    requests: RequestsConfig = RequestsConfig()
    spool: SpoolConfig = SpoolConfig()
    metrics: MetricsConfig = MetricsConfig()
    traces: TracesConfig | None = None
    """None: no spans are made."""
    mail: MailConfig | None = None
    """None: links stand in the answers alone."""


class WrittenWebhook(Strict, frozen=True, kw_only=True):
    """`[[webhook]]`: an endpoint that events of an organization are sent to."""

    name: Name
    url: Annotated[str, Meta(min_length=1, max_length=2048)]
    event_types: Annotated[list[Name], Meta(min_length=1, max_length=32)]
    org: OrgId | None = None
    """None: the operator's."""
    secret_file: Path
    """The file that holds the secret its messages are signed by, `whsec_` and base64, read again at
    each reload. The one before signs beside it for a day."""


class SettingsFile(PlainSettings, frozen=True, kw_only=True):
    """`tollgate.toml`."""

    model: list[WrittenModel] = []
    webhook: Annotated[list[WrittenWebhook], Meta(max_length=100)] = []
    plan: dict[Name, Any] = {}
    """Each a `WrittenPlan`; converted one by one, so that an error can name it."""
    engine: EngineTable = {}
    price_books: list[Path] = []


def decode_path(kind: type, value: Any) -> Path:
    """Decode a path, for msgspec: settings hold no other foreign type.

    Raises: TypeError (a wrong type, or no path).
    """
    if kind is Path and isinstance(value, str) and may_be_path(value):
        return Path(value)
    raise TypeError("Expected a path")


def may_be_path(value: str) -> bool:
    """Tell whether a system call would take it."""
    written = os.fsencode(value) if "\0" not in value else b""
    parts = written.split(b"/")
    return (
        value.isprintable()
        and 0 < len(value) <= MAX_PATH_CHARS >= len(written)
        and (max(map(len, parts)) <= MAX_PART_BYTES)
    )


def explain(error: msgspec.ValidationError, inside: str = "") -> str:
    """Return msgspec's message with the key first: `model[0].nme: unknown key`."""
    message, _, where = str(error).partition(" - at `")
    path = f"{inside}{where.removesuffix('`').removeprefix('$')}".removeprefix(".")
    if unknown := re.fullmatch(r"Object contains unknown field `(.+)`", message):
        return ".".join(part for part in (path, unknown[1]) if part) + ": unknown key"
    if missing := re.fullmatch(r"Object missing required field `(.+)`", message):
        return ".".join(part for part in (path, missing[1]) if part) + ": missing"
    kind, _, pattern = message.partition(" matching regex ")
    if pattern in IN_WORDS:
        kind = f"Expected {IN_WORDS[pattern]}"
    return one_line(f"{path or 'table'}: {kind[0].lower()}{kind[1:]}")


def one_line(text: str) -> str:
    """Return the text as it can be shown: without control characters, and cut in its middle."""
    shown = "".join(each if each.isprintable() else "?" for each in text[: 1 << 16])
    if len(shown) <= 2 * MAX_SHOWN_CHARS:
        return shown
    return f"{shown[:MAX_SHOWN_CHARS]} ... {shown[-MAX_SHOWN_CHARS // 2 :]}"
