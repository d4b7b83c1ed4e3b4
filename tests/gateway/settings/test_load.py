"""Settings and the secret: what wins over what, and that every mistake is named."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.app.served_models import routes_of
from gateway.db import normalise
from gateway.fleet.drain_marks import DrainMarks
from gateway.fleet.engine.kept_prefixes import unheard
from gateway.fleet.kv_index import KvIndex
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.fleet.router import Route
from gateway.home import Home
from gateway.principal import Plan
from gateway.secret import Secret, SecretError, SecretKey
from gateway.settings import load as module
from gateway.settings.file import (
    FileStoreConfig,
    SettingsError,
    SettingsFile,
    WrittenAdapter,
    WrittenMcp,
    WrittenMcpServer,
    WrittenMcpStdio,
    WrittenModel,
    WrittenPlan,
    WrittenReplica,
    WrittenToolLoop,
)
from gateway.settings.load import (
    DEFAULT_PLAN,
    SavedSettings,
    load,
    restore,
    save,
)
from gateway.settings.models import PACKAGE_ROOT, ReplicaConfig

FROM_THE_ISSUE = """
[[model]]
name = "penny"
path = "models/penny"
[[model]]
name = "big"
upstream = "http://127.0.0.1:9100/v1"      # short for one [[model.replica]]
api_key_env = "BIG_KEY"
[[model]]
name = "wide"
  [[model.replica]]
  upstream = "http://127.0.0.1:9100/v1"
  upstream_model = "Qwen3-32B"
  weight = 2
  [[model.replica]]
  upstream = "http://127.0.0.1:9101/v1/"
  upstream_model = "Qwen3-32B"
[plan.default]
tokens_per_minute = 1_000
requests_per_minute = 10
max_concurrent_streams = 2
[plan.free]
[engine]
dtype = "float32"
prefix_caching = false
"""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(content: str, name: str = "tollgate.toml") -> Path:
    path = Path(name)
    path.write_text(content)
    return path


def test_nothing_configured_serves_penny_on_loopback(tmp_path: Path) -> None:
    found = load({}, {})
    assert (found.host, found.port, found.workers) == ("127.0.0.1", 8000, 1)
    assert found.home == tmp_path / ".tollgate"
    assert found.secret_key_file == tmp_path / ".tollgate" / "secret.json"
    assert (found.database_url, found.redis_url) == (None, None)
    assert found.plans == (DEFAULT_PLAN,)
    (penny,) = found.models
    assert penny.name == "penny" and penny.path == PACKAGE_ROOT / "models" / "penny"
    assert penny.starts_engine and penny.engines == (f"unix:{Home(found.home).engine_socket(0)}",)


def test_the_sample_file_says_what_the_defaults_are() -> None:
    write((PACKAGE_ROOT / "tollgate.toml").read_text())
    assert load({}, {}) == load({"config": write("", "empty.toml")}, {})


def test_an_upstream_is_told_how_much_it_may_write_where_it_looks_for_it() -> None:
    newer = "max_tokens_field = 'max_completion_tokens'\n"
    of_each = "[[model.replica]]\nupstream = 'http://h/v1'\n"
    bounds = "max_output_tokens = 4096\nmax_image_tokens = 1600\n"
    for text, fields in (
        ("upstream = 'http://h/v1'\n" + bounds + newer, ["max_completion_tokens"]),
        (bounds + of_each + newer + of_each, ["max_completion_tokens", "max_tokens"]),
    ):
        write(MODEL + text)
        (model,) = load({}, {}).models
        assert [each.max_tokens_field for each in model.replicas] == fields
        assert (model.max_output_tokens, model.max_image_tokens) == (4096, 1600)


def test_an_upstream_takes_hints_at_how_much_to_think_where_that_is_said() -> None:
    takes, of_each = (
        "takes_reasoning_effort = true\n",
        "[[model.replica]]\nupstream = 'http://h/v1'\n",
    )
    for text, found in (
        ("upstream = 'http://h/v1'\n" + takes, [True]),
        (of_each + takes + of_each, [True, False]),
    ):
        write(MODEL + text)
        (model,) = load({}, {}).models
        assert [each.takes_reasoning_effort for each in model.replicas] == found


def test_a_model_says_for_itself_what_becomes_of_unknown_fields(tmp_path: Path) -> None:
    upstream = "upstream = 'http://h/v1'\n"
    named = "".join(
        f"[[model]]\nname = '{name}'\n{upstream}{own}"
        for name, own in (
            ("as all", ""),
            ("strict", "unknown_fields = 'refuse'\n"),
            ("lenient", "unknown_fields = 'ignore'\n"),
        )
    )
    for setting, ignoring in (
        ("", {"lenient"}),
        ("[compat]\nunknown_fields = 'ignore'\n", {"as all", "lenient"}),
    ):
        write(setting + named)
        with ThreadPoolExecutor(1) as executor:
            routes = upstream_routes(executor, tmp_path)
        assert {route.model for route in routes if route.ignores_unknown} == ignoring


def upstream_routes(executor: ThreadPoolExecutor, folder: Path) -> list[Route]:
    settings, threads = load({}, {}), PrepareThreads(executor=executor)
    rest = (threads, unheard, DrainMarks(folder / "drain_marks"), KvIndex(folder / "kv_index"))
    made = (routes_of(each, settings, (), [None], *rest, ()) for each in settings.models)
    return [route for routes in made for route in routes]


def test_an_upstream_is_asked_as_it_is_whatever_the_dialect(tmp_path: Path) -> None:
    upstream = "[[model]]\nname = 'far'\nupstream = 'http://h/v1'\n"
    write("[compat]\ndialect = 'vllm'\n" + upstream)
    with ThreadPoolExecutor(1) as executor:
        (route,) = upstream_routes(executor, tmp_path)
    assert (route.speaks_vllm, route.dialect) == (True, "upstream")
    assert msgspec.structs.replace(route, kind="engine").dialect == "vllm"
    write(upstream + "dialect = 'vllm'\n")
    with pytest.raises(SettingsError, match="dialect"):
        load({}, {})


def test_a_root_path_is_a_path() -> None:
    for path in ("/llm", "/a/b-c.d_e"):
        write(f"root_path = '{path}'\n")
        assert load({}, {}).root_path == path
    for path in ("llm", "/", "/llm/", "//a", "/a/../b", "/a b"):
        write(f"root_path = '{path}'\n")
        with pytest.raises(SettingsError, match="root_path"):
            load({}, {})


def test_the_file_of_the_issue() -> None:
    write(FROM_THE_ISSUE)
    found = load({}, {})
    penny, big, wide = found.models
    assert penny.starts_engine and not penny.replicas
    assert big.replicas == (
        ReplicaConfig(
            upstream="http://127.0.0.1:9100/v1", upstream_model="big", api_key_env="BIG_KEY"
        ),
    )
    assert [(each.upstream, each.weight) for each in wide.replicas] == [
        ("http://127.0.0.1:9100/v1", 2),
        ("http://127.0.0.1:9101/v1", 1),
    ]
    assert found.plans == (
        Plan(
            name="default",
            tokens_per_minute=1000,
            requests_per_minute=10,
            max_concurrent_streams=2,
        ),
        Plan(name="free"),
    )
    flags = ["--dtype", "float32", "--no-prefix-caching"]
    assert penny.engine_options.to_flags() == flags


@pytest.mark.parametrize("service", ["tollgate", "tollgate-engine", "tollgate-gateway-2"])
def test_the_variables_of_a_kubernetes_service_are_no_settings(service: str) -> None:
    name = service.upper().replace("-", "_")
    links = {
        f"{name}_SERVICE_HOST": "10.0.0.11",
        f"{name}_SERVICE_PORT": "8000",
        f"{name}_SERVICE_PORT_HTTP": "8000",
        f"{name}_PORT": "tcp://10.0.0.11:8000",
        f"{name}_PORT_8000_TCP": "tcp://10.0.0.11:8000",
        f"{name}_PORT_8000_TCP_PROTO": "tcp",
        f"{name}_PORT_8000_TCP_PORT": "8000",
        f"{name}_PORT_8000_TCP_ADDR": "10.0.0.11",
    }
    assert load({}, links) == load({}, {})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TOLLGATE_ENGINE_PORT", "9000"),
        ("TOLLGATE_SERVICE", "tcp://10.0.0.11:8000"),
        ("TOLLGATE_PORT_8000", "tcp://10.0.0.11:8000"),
        ("TOLLGATE_SERVICES_HOST", "10.0.0.11"),
    ],
)
def test_what_kubernetes_does_not_set_stays_unknown(variable: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"{variable}: unknown"):
        load({}, {variable: value})


def test_a_flag_wins_over_a_variable_and_that_over_the_file() -> None:
    write('port = 1\nhost = "file"\nworkers = 1\n')
    environ = {"TOLLGATE_PORT": "2", "TOLLGATE_HOST": "variable", "PORT": "9"}
    found = load({"port": 3, "host": None}, environ)
    assert (found.port, found.host, found.workers) == (3, "variable", 1)


def test_an_empty_variable_is_not_set() -> None:
    assert load({}, {"TOLLGATE_DATABASE_URL": "", "TOLLGATE_PORT": ""}) == load({}, {})


def test_config_is_found_by_flag_before_variable() -> None:
    one, two = write("port = 1", "one.toml"), write("port = 2", "two.toml")
    assert load({"config": one}, {"TOLLGATE_CONFIG": str(two)}).port == 1
    assert load({}, {"TOLLGATE_CONFIG": str(two)}).port == 2


@pytest.mark.parametrize("given_as", ["flag", "variable"])
def test_a_model_folder_stands_in_for_all_configured_ones(tmp_path: Path, given_as: str) -> None:
    write(FROM_THE_ISSUE)
    folder = tmp_path / "Qwen3-0.6B"
    folder.mkdir()
    if given_as == "flag":
        found = load({"model": Path("Qwen3-0.6B")}, {})
    else:
        found = load({}, {"TOLLGATE_MODEL": "Qwen3-0.6B"})
    (model,) = found.models
    assert (model.name, model.path) == ("Qwen3-0.6B", folder)


def test_an_engine_that_runs_elsewhere_is_not_started() -> None:
    write('[[model]]\nname = "penny"\npath = "models/penny"\nengine = "tcp:localhost:9000"')
    (model,) = load({}, {}).models
    assert (model.engines, model.starts_engine) == (("tcp:localhost:9000",), False)


GOOD = "QUJD" * 11
"""33 bytes in base64."""
SERVER = "[[mcp.servers]]\nname = 'a'\n"
API = SERVER + "url = 'https://h.example/v1'\n"
MODEL = '[[model]]\nname = "m"\n'
ADAPTED = MODEL + "path = 'a'\n[[model.adapter]]\n"
MISTAKES = [
    ("[file_store]", "tollgate.toml: file_store.bucket: missing"),
    ("[file_store]\nbucket = 'a/b'", "tollgate.toml: file_store.bucket: expected the name of a"),
    ("[file_store]\nbucket = 'b'\nprefix = '../c'", "tollgate.toml: file_store.bucket: "),
    (
        "[file_store]\nbucket = 'bb'\nprefix = '../c'",
        "tollgate.toml: file_store.prefix: expected n",
    ),
    (
        "[file_store]\nbucket = 'bb'\npart_bytes = 1",
        "file_store.part_bytes: expected `int` >= 1024",
    ),
    ("[file_store]\nbucket = 'bb'\nsecret = 'x'", "tollgate.toml: file_store.secret: unknown key"),
    ("prot = 1", "tollgate.toml: prot: unknown key"),
    ('port = "x"', "tollgate.toml: port: expected `int`, got `str`"),
    ("port = 70000", "tollgate.toml: port: expected `int` <= 65535"),
    ("workers = 0", "tollgate.toml: workers: expected `int` >= 1"),
    ("port = ", "tollgate.toml: not TOML: Invalid value"),
    ('home = ""', "tollgate.toml: home: expected a path"),
    ("[plan]\nfree = 3", "tollgate.toml: plan.free: expected `object`, got `int`"),
    ("[plan.free]\ntokens = 3", "tollgate.toml: plan.free.tokens: unknown key"),
    ("[plan.free]\ntokens_per_minute = -1", "plan.free.tokens_per_minute: expected `int` >= 0"),
    ("[engine]\ndtyp = 'x'", "tollgate.toml: engine.dtyp: unknown key"),
    ("[engine]\ndtype = 'float8'", "tollgate.toml: engine.dtype: invalid enum value 'float8'"),
    ("metrics = {tenants = true}", "metrics.tenants: wants metrics.port, or clients read"),
    ("trusted_proxies = ['10.0.0.1/8']", "trusted_proxies[0]: 10.0.0.1/8 has host bits set"),
    ("trusted_proxies = ['::1', 'lb']", "trusted_proxies[1]: 'lb' does not appear to be an IP"),
    ("[mcp]\nserver = []", "tollgate.toml: mcp.server: unknown key"),
    ("[[mcp.servers]]\nname = 'A'\nurl = 'https://h'", "mcp.servers[0].name: expected 1 to 24 of"),
    ("[[mcp.servers]]\nname = 'a'\nurl = 'h'", "mcp.servers[0].url: expected a URL such as"),
    (
        "[[mcp.servers]]\nname = 'a'\nurl = 'https://h'\n" * 2,
        "mcp.servers[1].name: 'a' stands there twice",
    ),
    (SERVER + "url = 'http://h.example'", "mcp.servers[0].url: http is for network = 'private'"),
    (SERVER + "url = 'http://localhost/mcp'", "says network = 'loopback'"),
    (SERVER + "url = 'https://[::1]/mcp'\nnetwork = 'private'", "says network = 'loopback'"),
    (SERVER + "url = 'https://10.0.0.1/mcp'", "the operator's own networks are 'private'"),
    (SERVER + "url = 'https://169.254.1.1'\nnetwork = 'private'", "is not a public address"),
    (SERVER, "mcp.servers[0] (a): wants exactly one of url, command"),
    (SERVER + "command = 'npx'", "mcp.servers[0].command: must be an absolute path"),
    (SERVER + "command = '/x'\nlimits = {cpus = 1}", "mcp.servers[0].limits.cpus: unknown key"),
    (SERVER + "command = '/x'\ncredential_names = ['A']", "mcp.servers[0].credential: whose"),
    (SERVER + "url = 'https://u:p@h.example'", "credentials belong into the vault"),
    (SERVER + "openapi = '/a.json'", "mcp.servers[0].openapi: wants a url"),
    (API + "openapi = 'a.json'", "openapi: an absolute path, or an http or https URL"),
    (API + "openapi = 'file:///a.json'", "openapi: an absolute path, or an http or https URL"),
    (API + "openapi = '/a.json'\ntransport = 'sse'", "servers[0].transport: is not for"),
    (API + "query_credentials = ['key']", "query_credentials: is for a server with openapi"),
    ("price_books = [1]", "tollgate.toml: price_books[0]: expected a path"),
    ("redis_url = '127.0.0.1'", "redis_url: expected a URL such as 'redis://"),
    ("database_url = 'mysql://h/d'", "tollgate.toml: database_url: Postgres only, not 'mysql'"),
    ("database_url = 'postgresql://h'", "tollgate.toml: database_url: it names no database"),
    ("[[model]]\npath = 'x'", "tollgate.toml: model[0].name: missing"),
    ("[[model]]\nnme = 'x'", "tollgate.toml: model[0].nme: unknown key"),
    (MODEL, "model[0] (m): wants exactly one of path, upstream, replica"),
    (MODEL + "path = 'a'\nupstream = 'http://h/v1'", "model[0] (m): wants exactly one of"),
    (MODEL + "path = 'a'\nupstream_model = 'b'", "model[0].upstream_model: only for an upstream"),
    (MODEL + "path = 'a'\nengine = 'penny'", "model[0].engine: expected 'unix:/path' or 'tcp:"),
    (MODEL + "upstream = 'http://h/v1'\nengine = 'unix:/s'", "model[0].engine: only for a model"),
    (MODEL + "upstream = 'h:9100'", "model[0].upstream: expected a URL such as 'http://"),
    (MODEL + "[[model.replica]]\nweight = 0", "model[0].replica[0].weight: expected `int` >= 1"),
    (MODEL + "[[model.replica]]\nweight = 1", "model[0].replica[0].upstream: missing"),
    (
        MODEL + "upstream = 'http://h/v1'\napi_key_env = 'K'\napi_key_file = 'k'",
        "model[0]: of api_key_env and api_key_file only one can hold the key",
    ),
    (
        MODEL + "api_key_file = 'k'\n[[model.replica]]\nupstream = 'http://h/v1'",
        "model[0]: api_key_file belongs into each replica",
    ),
    (MODEL + "path = 'm'\napi_key_file = 'k'", "model[0].api_key_file: only for an upstream"),
    (
        MODEL + "api_key_env = 'K'\n[[model.replica]]\nupstream = 'http://h/v1'",
        "model[0]: upstream_model and api_key_env belong into each replica",
    ),
    (
        MODEL + "max_concurrency = 2\n[[model.replica]]\nupstream = 'http://h/v1'",
        "model[0]: max_concurrency belongs into each replica",
    ),
    (MODEL + "path = 'a'\nmax_concurrency = 2", "model[0].max_concurrency: only for an upstream"),
    (MODEL + "path = 'a'\nmax_output_tokens = 2", "model[0].max_output_tokens: only for an up"),
    (MODEL + "path = 'a'\nmax_tokens_field = 'max_tokens'", "model[0].max_tokens_field: only for"),
    (
        MODEL + "path = 'a'\ntakes_reasoning_effort = true",
        "model[0].takes_reasoning_effort: only for",
    ),
    (
        MODEL + "takes_reasoning_effort = true\n[[model.replica]]\nupstream = 'http://h/v1'",
        "model[0]: takes_reasoning_effort belongs into each replica",
    ),
    (
        MODEL + "max_tokens_field = 'max_tokens'\n[[model.replica]]\nupstream = 'http://h/v1'",
        "model[0]: max_tokens_field belongs into each replica",
    ),
    (
        MODEL + "upstream = 'http://h/v1'\nmax_tokens_field = 'tokens'",
        "model[0].max_tokens_field: invalid enum value 'tokens'",
    ),
    (
        MODEL + "upstream = 'http://h/v1'\nmax_concurrency = 0",
        "model[0].max_concurrency: expected `int` >= 1",
    ),
    (
        "workers = 3\n" + MODEL + "upstream = 'http://h/v1'\nmax_concurrency = 2",
        "model[0] (m): max_concurrency 2 cannot be shared by 3 workers",
    ),
    (
        MODEL + "upstream = 'http://h/v1'\ntool_call_parser = 'hermes'",
        "model[0].tool_call_parser: only for a model with a path",
    ),
    (
        MODEL + "path = 'a'\ntool_call_parser = 'gpt'",
        "model[0].tool_call_parser: invalid enum value 'gpt'",
    ),
    (
        MODEL + "path = 'a'\nchat_template = 'absent.jinja'",
        "model[0].chat_template: there is no file /",
    ),
    (2 * (MODEL + "path = 'a'\n"), "model[1].name: there are two models named 'm'"),
    (
        MODEL + "path = 'a'\n[model.engine_options]\ndtyp = 'x'",
        "model[0].engine_options.dtyp: unknown key",
    ),
    (
        MODEL + "path = 'a'\nengine = 'tcp:[::1]:1'\n[model.engine_options]\nseed = 1",
        "model[0].engine_options: only for an engine that is started here",
    ),
    (
        MODEL + "upstream = 'http://h/v1'\n[model.engine_options]\nseed = 1",
        "model[0].engine_options: only for a model with a path",
    ),
    (
        MODEL + "upstream = 'http://h/v1'\n[[model.adapter]]\nname = 'a'\npath = 'a'",
        "model[0].adapter: only for a model with a path",
    ),
    (
        ADAPTED + "name = 'm'\npath = 'b'",
        "model[0].adapter[0].name: there are two models named 'm'",
    ),
    (
        ADAPTED + "name = 'n'\npath = 'b'\n[[model]]\nname = 'n'\npath = 'a'",
        "model[1].name: there are two models named 'n'",
    ),
    (ADAPTED + "name = 'a=b'\npath = 'b'", "model[0].adapter[0].name: expected a name of 1 to 128"),
    (ADAPTED + "name = 'b'", "model[0].adapter[0].path: missing"),
    (ADAPTED + "name = 'b'\npath = 'b'\nrank = 4", "model[0].adapter[0].rank: unknown key"),
    (
        MODEL + "path = 'a'\nengine = 'tcp:[::1]:1'\n[[model.adapter]]\nname = 'b'\npath = 'b'",
        "model[0].adapter[0].path: only for an engine that is started here",
    ),
]


@pytest.mark.parametrize(("content", "complaint"), MISTAKES)
def test_a_mistake_in_the_file_is_named(content: str, complaint: str) -> None:
    write(content)
    with pytest.raises(SettingsError) as caught:
        load({}, {})
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "complaint"),
    [
        ("TOLLGATE_PROT", "1", "TOLLGATE_PROT: unknown; known are TOLLGATE_CONFIG, "),
        ("TOLLGATE_PORT", "x", "TOLLGATE_PORT: expected `int`, got `str`"),
        ("TOLLGATE_PORT", "70000", "TOLLGATE_PORT: expected `int` <= 65535"),
        ("TOLLGATE_WORKERS", "1.5", "TOLLGATE_WORKERS: expected `int`"),
        ("TOLLGATE_CONFIG", "no.toml", "config: no.toml does not exist"),
        ("TOLLGATE_CONFIG", "no\ntoml", r"config: 'no\ntoml' is no path"),
        ("TOLLGATE_MODEL", "m" * 300, "m' is no path"),
        ("TOLLGATE_PORT", "\udcff", "TOLLGATE_PORT: not UTF-8"),
        ("TOLLGATE_HOME", "a\nb", "TOLLGATE_HOME: expected a path"),
        ("TOLLGATE_HOST", " \t", "TOLLGATE_HOST: expected 1 to 128 characters that can be seen"),
        ("TOLLGATE_DATABASE_URL", "nonsense", "TOLLGATE_DATABASE_URL: not a database URL"),
    ],
)
def test_a_mistake_in_a_variable_is_named(variable: str, value: str, complaint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load({}, {variable: value})
    assert complaint in str(caught.value)


NOTHING_SENSIBLE = [
    "-1",
    "nan",
    "-inf",
    "1" * 26,
    r'"a\nb"',
    r'"\u0000"',
    '" \\n"',
    "[[]]",
    "{x = 1}",
]
BEFORE = {
    SettingsFile: "",
    WrittenModel: "[[model]]\nname = 'm'\nupstream = 'http://h/v1'\n",
    WrittenReplica: "[[model]]\nname = 'm'\n[[model.replica]]\nupstream = 'http://h/v1'\n",
    WrittenAdapter: (
        "[[model]]\nname = 'm'\npath = 'a'\n[[model.adapter]]\nname = 'b'\npath = 'b'\n"
    ),
    WrittenPlan: "[plan.x]\n",
    FileStoreConfig: "[file_store]\nbucket = 'bucket'\n",
    WrittenMcp: "[mcp]\n",
    WrittenToolLoop: "[mcp.loop]\n",
    WrittenMcpStdio: "[mcp.stdio]\n",
    WrittenMcpServer: "[[mcp.servers]]\nname = 's'\nurl = 'https://h/mcp'\n",
}
"""The tables of the file, each with what it has to have."""
ANYTHING = {"engine", "plan", "environment", "deadlines", "slo"}
"""Tables whose keys are judged elsewhere, or by their values."""


@pytest.mark.parametrize("kind", BEFORE, ids=lambda kind: kind.__name__)
def test_what_makes_no_sense_is_refused_by_name_everywhere(kind: Any) -> None:
    for field in msgspec.structs.fields(kind):
        for value in NOTHING_SENSIBLE:
            if field.encode_name in ANYTHING and value.startswith("{"):
                continue
            lines = BEFORE[kind].splitlines()
            kept = [line for line in lines if not line.startswith(f"{field.encode_name} =")]
            write("\n".join([*kept, f"{field.encode_name} = {value}"]))
            with pytest.raises(SettingsError) as caught:
                load({}, {})
            told = str(caught.value)
            assert told.startswith("tollgate.toml: ") and told.isprintable(), told
            assert field.encode_name in told and len(told) < 1000


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("x = " + "[" * 100_000, "nested too deep"),
        ("log_level = '" + "x" * 100_000 + "'", "log_level: invalid enum value 'xxx"),
        (MODEL + f"path = '{'x' * 300}'", "model[0].path: expected a path"),
        (MODEL + "upstream = 'http://h:99999/v1'", "model[0].upstream: expected a URL"),
        (MODEL + "upstream = 'http://h /v1'", "model[0].upstream: expected a URL"),
        (MODEL + 'upstream = "http://h/v1\\n"', "model[0].upstream: expected a URL"),
        (MODEL + "path = 'a'\nengine = 'tcp:h:0'", "model[0].engine: expected 'unix:/path'"),
        ('[[mcp.servers]]\nname = "s\\n"', "mcp.servers[0].name: expected 1 to 24"),
        ('root_path = "/a\\n"', "root_path: expected a path"),
    ],
)
def test_a_hostile_file_is_one_short_line(content: str, complaint: str) -> None:
    write(content)
    with pytest.raises(SettingsError) as caught:
        load({}, {})
    assert complaint in str(caught.value)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "name", ["http://h:65535/v1", "https://[::1]:9/", "http://u:p@h", "http://h?a"]
)
def test_urls_of_any_form_are_taken(name: str) -> None:
    write(MODEL + f"upstream = '{name}'")
    assert load({}, {}).models[0].name == "m"


def test_a_mistake_in_a_flag_is_named() -> None:
    with pytest.raises(SettingsError, match="--port: expected `int` <= 65535"):
        load({"port": 70000}, {})


def test_a_file_that_cannot_be_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("folder.toml").mkdir()
    with pytest.raises(SettingsError, match=r"folder.toml: Is a directory"):
        load({"config": Path("folder.toml")}, {})
    Path("bytes.toml").write_bytes(b"\xff")
    with pytest.raises(SettingsError, match=r"bytes.toml: not UTF-8"):
        load({"config": Path("bytes.toml")}, {})
    monkeypatch.setattr(module, "MAX_CONFIG_BYTES", 10)
    with pytest.raises(SettingsError, match="larger than 10 bytes"):
        load({"config": write("#" * 11)}, {})


def test_a_password_in_a_url_is_in_no_error() -> None:
    for url in (
        "postgresql://u:hunter2@h",
        "mysql://u:hunter2@h/d",
        "postgresql://u:hunter2@h:x/d",
    ):
        with pytest.raises(SettingsError) as caught:
            load({}, {"TOLLGATE_DATABASE_URL": url})
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+asyncpg"])
def test_database_urls_as_people_write_them(scheme: str) -> None:
    url = normalise(f"{scheme}://u:p%40ss@h:5433/d?ssl=require")
    assert url == "postgresql+asyncpg://u:p%40ss@h:5433/d?ssl=require"


def test_settings_survive_the_way_to_a_worker(tmp_path: Path) -> None:
    store = "[file_store]\nbucket = 'b-1'\nprefix = 'a/b'\npath_style = false\n"
    server = "[[mcp.servers]]\nname = 'a'\nurl = 'https://h/mcp'\n"
    write("trusted_proxies = ['10.0.0.0/8', '::1']\n" + FROM_THE_ISSUE + "\n" + store + server)
    found = load({}, {"TOLLGATE_REDIS_URL": "redis://:secret@h:1/0"})
    assert found.trusted_proxies == ("10.0.0.0/8", "::1")
    assert found.file_store is not None and found.file_store.prefix == "a/b"
    assert found.mcp.servers[0].url == "https://h/mcp"
    path = tmp_path / "settings.json"
    for _ in range(2):
        save(SavedSettings(number=1, settings=found), path)
        assert restore(path).settings == found
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_secret_is_made_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "secret.json"
    made = Secret.load_or_create(path)
    assert Secret.load_or_create(path) == made == Secret.load(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    assert made.current.secret not in repr(made)


def test_gateways_that_start_at_once_share_one_secret(tmp_path: Path) -> None:
    path = tmp_path / "secret.json"
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(Secret.load_or_create, [path] * 64))
    assert len(set(made)) == 1


@given(st.text(), st.text())
def test_each_purpose_has_a_key_of_its_own(one: str, other: str) -> None:
    key = SecretKey(id="a", secret=GOOD)
    assert (key.derive(one) == key.derive(other)) == (one == other)
    assert len(key.derive(one)) == 32


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "truncated"),
        ('{"version": 2, "keys": []}', "version"),
        ('{"version": 1, "keys": []}', "keys: at least one"),
        ('{"version": 1, "keys": [{"id": "a"}]}', "missing required field `secret`"),
        ('{"version": 1, "keys": [{"id": "a", "secret": "hunter2 "}]}', "keys[0].secret: not base"),
        ('{"version": 1, "keys": [{"id": "a", "secret": "aHVudGVyMg=="}]}', "shorter than 32"),
        (
            f'{{"version": 1, "keys": [{2 * f"""{{"id": "a", "secret": "{GOOD}"}},"""}'.rstrip(",")
            + "]}",
            "an id stands there twice",
        ),
    ],
)
def test_a_broken_secret_is_refused_and_not_shown(
    tmp_path: Path, content: str, complaint: str
) -> None:
    path = tmp_path / "secret.json"
    path.write_text(content)
    with pytest.raises(SecretError) as caught:
        Secret.load_or_create(path)
    assert complaint in str(caught.value) and str(path) in str(caught.value)
    assert "hunter2" not in str(caught.value) and "aHVudGVyMg" not in str(caught.value)
    assert path.read_text() == content


def test_a_secret_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SecretError, match="No such file"):
        Secret.load_or_create(tmp_path / "no" / "secret.json")


def test_homes_do_not_share_sockets(tmp_path: Path) -> None:
    long = ["x" * 120, "y" * 120]
    sockets = {Home(tmp_path / name).engine_socket(at) for name in (*long, "z") for at in (0, 1)}
    assert len(sockets) == 6


@pytest.mark.parametrize(
    "url",
    [
        "https://gateway.example.com",
        "https://gateway.example.com:8443",
        "http://127.0.0.1:8000",
        "http://localhost",
        "http://[::1]:8000",
    ],
)
def test_the_public_url_is_the_issuer(url: str) -> None:
    assert load({}, {"TOLLGATE_PUBLIC_URL": url}).issuer == url


@pytest.mark.parametrize(
    "url",
    [
        "https://gateway.example.com/",
        "https://gateway.example.com/path",
        "https://gateway.example.com?query",
        "https://user@gateway.example.com",
        "https://Gateway.example.com",
        "https://gateway.example.com:port",
        "https://gateway.example.com:0",
        "https://gätew.example",
        "https://",
        "http://gateway.example.com",
        "http://[::1",
        "gateway.example.com",
    ],
)
def test_no_other_public_url_is_taken(url: str) -> None:
    with pytest.raises(SettingsError, match="public_url|TOLLGATE_PUBLIC_URL"):
        load({}, {"TOLLGATE_PUBLIC_URL": url})


@pytest.mark.parametrize(
    ("host", "issuer"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
    ],
)
def test_without_a_public_url_the_address_is_the_issuer(host: str, issuer: str) -> None:
    assert load({"host": host}, {}).issuer == issuer
