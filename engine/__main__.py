"""The engine's process: arguments in, an exit code out.

`python -m engine --model PATH --listen ADDRESS`. Exit codes: 0 after a drain (SIGTERM, SIGINT), 1
when the step thread died, 2 when it cannot start as configured. Knows no supervisor: whoever starts
this process restarts it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import msgspec

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineStepFailed
from engine.kernels.cpu.compiling.compilers import compiling
from engine.model_cache.cache import DEFAULT_MAX_BYTES, Access, ModelCache, hold_if_cached
from engine.model_cache.remote_files import Part
from engine.model_cache.s3_files import S3Access
from engine.model_cache.sources import VERSION, ModelSource, is_source, parse_source
from engine.options import EngineOptions, Option, engine_options
from engine.protocol import EngineRole
from engine.text.hub import LineOnTerminal, fetch, names_a_repository
from engine.text.model_folder import check_model_folder, has_tokenizer
from engine.text.tokenizer import Tokenizer
from engine.transport.entrance import is_local
from engine.transport.frames import TcpAddress, parse_address
from engine.transport.joining import (
    JoinedEntrance,
    folders_of,
    identity_of,
    identity_without_files,
)
from engine.transport.peer_files import ModelFetch
from engine.transport.server import EngineServer
from engine.transport.startup import Startup
from engine.transport.usage_record import UsageRecord
from foundation import logs
from foundation.imports import importing

if TYPE_CHECKING:  # it imports torch, which a typo need not wait for
    from engine.core.engine_core import EngineCore

log = logging.getLogger("engine")

DRAIN_TIMEOUT_S = 30.0
EXPLAINED_MODEL = Path("models/penny")
PACKAGE_ROOT = Path(__file__).resolve().parents[1]
"""Beside this package lies models/penny."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    name = arguments.served_name or arguments.model or arguments.join
    logs.configure(
        arguments.log_level, json_lines=arguments.log_format == "json", process=f"engine {name}"
    )
    try:
        if arguments.listen is not None:
            _check_address(arguments)  # a typo is told before the weights are loaded
        home = _home_to_join(arguments)
        joined = None if home is None else _entrance_to(home, arguments)
        startup = Startup()
        with startup.phase("hub"):
            if joined is None or not _fetch_from_peers(joined, arguments):
                _fetch_model(arguments)
            _hold_cached(arguments)
        _check_model(arguments)
        config = _config(arguments)
        if joined is not None:
            _ask_to_join(joined, config, _role_of(arguments))
            config = _met_by_certificate(config, joined)
        core = _load(config, startup)
        if arguments.explain:
            from engine.core.explanation import explain

            print(explain(core.resolved))
            core.close()
            return 0
        with closing(core), _record_at(arguments.usage_record) as record:
            server = EngineServer(core, joined or arguments.listen, record)
            core.begin_grammars()
            asyncio.run(_serve(server, arguments.drain_timeout_s))
    except ConfigError as error:
        print(f"engine: {error.message}", file=sys.stderr)
        return 2
    except EngineStepFailed as error:
        log.critical("%s: %s", error.message, error.__cause__)
        return 1
    except KeyboardInterrupt:  # while loading; later SIGINT drains
        return 130
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Exits with a usage line when an engine that is to serve lacks what it needs for that."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.explain:
        arguments.model = arguments.model or EXPLAINED_MODEL
        arguments.log_level = "warning"
    is_anywhere = arguments.listen is not None or arguments.join is not None
    has_model = arguments.model is not None or arguments.join is not None
    missing = [] if has_model else ["--model"]
    missing += [] if is_anywhere else ["--listen"]
    if missing and not arguments.explain:
        parser.error(f"the following arguments are required: {', '.join(missing)}")
    if arguments.listen is not None and arguments.join is not None:
        parser.error("argument --join: not allowed with argument --listen")
    if arguments.join is not None and arguments.token is None:
        parser.error("argument --join: wants --token")
    for option in ("joined_file", "role"):
        if getattr(arguments, option) is not None and arguments.join is None:
            parser.error(f"argument --{option.replace('_', '-')}: only with --join")
    return arguments


def _check_address(arguments: argparse.Namespace) -> None:
    if arguments.insecure or is_local(arguments.listen):
        return
    raise ConfigError(
        f"--listen {arguments.listen}: open to other machines, without encryption or credentials; "
        "--join a gateway, or say --insecure where nobody else reaches it"
    )


def _home_to_join(arguments: argparse.Namespace) -> TcpAddress | None:
    if arguments.join is None:
        return None
    try:
        home = parse_address(f"tcp:{arguments.join}")
    except ConfigError:
        raise ConfigError(f"--join {arguments.join}: expected HOST:PORT") from None
    assert isinstance(home, TcpAddress)
    return home


def _entrance_to(home: TcpAddress, arguments: argparse.Namespace) -> JoinedEntrance:
    """Return the way to a home, which has not been asked yet."""
    from engine.transport.join_identity import JoinIdentity  # the certificates' library

    beside = arguments.token.with_name(arguments.token.name + ".identity")
    identity = JoinIdentity(arguments.identity or beside, arguments.token)
    given = vars(arguments)
    options = EngineOptions(**{name: given[name] for name in EngineOptions.__struct_fields__})
    engine = identity_without_files(options, arguments.served_name, _role_of(arguments))
    try:
        return JoinedEntrance(home, identity, engine, arguments.joined_file)
    except OSError as error:
        raise ConfigError(f"--joined-file {arguments.joined_file}: {error.strerror}") from None


def _met_by_certificate(config: EngineConfig, joined: JoinedEntrance) -> EngineConfig:
    """Let engines of other machines read by the certificates of their joins: over TLS, unless they
    are to come in the clear, and where all addresses are asked for at the one that the home sees.
    """
    if config.peer_listen is None or config.insecure or is_local(config.peer_listen):
        return config
    address = parse_address(config.peer_listen)
    assert isinstance(address, TcpAddress)
    if address.host in ("0.0.0.0", "::"):
        address = TcpAddress(joined.own_host(), address.port)
    return msgspec.structs.replace(
        config, peer_listen=str(address), peer_identity=joined.identity_path
    )


def _role_of(arguments: argparse.Namespace) -> EngineRole:
    role: EngineRole = arguments.role or "both"
    return role


def _ask_to_join(joined: JoinedEntrance, config: EngineConfig, role: EngineRole) -> None:
    """Ask the home whether it takes this engine, before the weights are loaded."""
    path = joined.identity_path
    files = path.with_name(path.name + ".files")
    engine = identity_of(config, files, role)
    joined.identify(engine, folders_of(config))
    asyncio.run(joined.ask())


def _fetch_from_peers(joined: JoinedEntrance, arguments: argparse.Namespace) -> bool:
    """Fetch the model, where it is no folder here, from what the gateway that is joined offers.
    Return whether it came."""
    given = None
    if arguments.model is not None:
        if not is_source(arguments.model):
            return False
        given = _source_of(arguments)
    offer = asyncio.run(joined.ask_for_files(waits=given is None))
    if offer is None:
        if given is None:
            raise ConfigError(f"{joined.home} does not say what it has of its model: give --model")
        return False
    fetch_model = ModelFetch(_cache_of(arguments), joined.home, joined.dial, offer, given)
    part: Part = "texts" if arguments.load_format == "dummy" else "model"
    found = fetch_model.run(part, arguments.version, _by_name(arguments.adapters))
    arguments.model = found.folder
    arguments.served_name = arguments.served_name or found.name
    arguments.adapters = [*arguments.adapters, *found.adapters.items()]
    return True


def _fetch_model(arguments: argparse.Namespace) -> None:
    """A model that is named like one on a hub becomes the folder it was fetched to, unless it is
    one that comes with Tollgate."""
    if is_source(arguments.model):
        _fetch_from_source(arguments)
        return
    if arguments.version is not None:
        raise ConfigError(f"--version is for a model of the cache; {arguments.model} is none")
    shipped = PACKAGE_ROOT / arguments.model
    if not arguments.model.exists() and shipped.exists():
        arguments.model = shipped
    if not names_a_repository(arguments.model):
        if arguments.revision is not None:
            raise ConfigError(f"--revision is for a model on a hub; {arguments.model} is none")
        return
    name = str(arguments.model)
    arguments.served_name = arguments.served_name or name
    weights = arguments.load_format != "dummy"
    arguments.model = fetch(name, revision=arguments.revision, weights=weights).folder


def _fetch_from_source(arguments: argparse.Namespace) -> None:
    """A model of a source becomes its folder in the model cache."""
    source = _source_of(arguments)
    arguments.served_name = arguments.served_name or str(source)
    found = _cache_of(arguments).fetch(
        source,
        LineOnTerminal(str(source)),
        part="texts" if arguments.load_format == "dummy" else "model",
        version=arguments.version,
    )
    arguments.model = found.folder


def _source_of(arguments: argparse.Namespace) -> ModelSource:
    if arguments.revision is not None:
        raise ConfigError(f"--revision: write hf:ORG/NAME@REVISION in place of {arguments.model}")
    return parse_source(arguments.model)


def _cache_of(arguments: argparse.Namespace) -> ModelCache:
    access = Access(s3=S3Access(endpoint=arguments.s3_endpoint))
    return ModelCache(arguments.model_cache, arguments.model_cache_bytes, access)


def _hold_cached(arguments: argparse.Namespace) -> None:
    """Keep model and adapters in the cache, if they are in one: the locks end with the process."""
    for folder in (arguments.model, *(path for _, path in arguments.adapters)):
        hold_if_cached(folder)


def _check_model(arguments: argparse.Namespace) -> None:
    """Look over the folder before torch is imported, so that what is wrong is told at once."""
    check_model_folder(arguments.model, weights=arguments.load_format != "dummy")
    if has_tokenizer(arguments.model):
        Tokenizer.load(arguments.model)


def _load(config: EngineConfig, startup: Startup) -> EngineCore:
    with compiling(config.device):
        try:
            with startup.phase("import"), importing():
                from engine.core.engine_core import EngineCore
        except ModuleNotFoundError as error:
            needs = 'an engine needs what the extra "engine" of the package tollgate installs'
            raise ConfigError(f"{error.name} is not installed: {needs}") from error
        return EngineCore(config, startup=startup)


@contextmanager
def _record_at(path: Path | None) -> Iterator[UsageRecord | None]:
    if path is None:
        yield None
        return
    try:
        record = UsageRecord(path)
    except OSError as error:
        raise ConfigError(f"--usage-record {path}: {error.strerror}") from error
    try:
        yield record
    finally:
        record.close()


async def _serve(server: EngineServer, drain_timeout_s: float) -> None:
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    await server.serve(stop, drain_timeout_s=drain_timeout_s)


def _config(arguments: argparse.Namespace) -> EngineConfig:
    """Every argument that is named like a field is that field."""
    given = vars(arguments)
    fields = {name: given[name] for name in EngineConfig.__struct_fields__ if name in given}
    return EngineConfig(**(fields | {"adapters": _by_name(arguments.adapters)}))


def _by_name(adapters: Sequence[tuple[str, Path]]) -> dict[str, Path]:
    found = dict(adapters)
    if len(found) < len(adapters):
        raise ConfigError("--adapter: a name is given twice")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine",
        description="Serve one model on a socket. Sizes are tokens unless they say bytes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    model = parser.add_argument_group("model")
    _add_model(model)
    _add_options(model, "model")
    _add_options(parser.add_argument_group("steps"), "steps")
    _add_options(parser.add_argument_group("memory"), "memory")
    process = parser.add_argument_group("process")
    process.add_argument("--listen", metavar="ADDRESS", help="unix:/path or tcp:host:port")
    process.add_argument(
        "--join",
        metavar="HOST:PORT",
        help="instead of --listen: dial the gateway of another machine (fleet.join_listen there)",
    )
    process.add_argument(
        "--role",
        choices=get_args(EngineRole),
        help="with --join: whether it computes prompts for others, goes on with those of others, "
        "or does both (the default), as the gateway's settings let engines join",
    )
    process.add_argument(
        "--token",
        type=Path,
        metavar="FILE",
        help="what `tollgate fleet token create` printed there; needed for the first join alone",
    )
    process.add_argument(
        "--identity",
        type=Path,
        metavar="FILE",
        help="keeps the key and certificate by which the gateway knows this engine; unset: beside "
        "the token, FILE.identity",
    )
    process.add_argument(
        "--joined-file",
        type=Path,
        metavar="FILE",
        help="a file that is there while the gateway has this engine, for a probe; unset: none",
    )
    process.add_argument(
        "--insecure",
        action="store_true",
        help="let --listen and --peer-listen be open to other machines: whoever is on the way "
        "reads and asks all",
    )
    process.add_argument(
        "--explain",
        action="store_true",
        help="start, print each option's value and where it came from, and which product "
        "multiplies what, and exit; without --model, of penny",
    )
    _add_options(process, "process")
    _add_process(process)
    return parser


def _add_options(group: argparse._ArgumentGroup, name: str) -> None:
    """Add the flags of a group in the table of options."""
    for option in engine_options():
        if option.group != name:
            continue
        if option.kind is bool:
            group.add_argument(
                option.flag,
                dest=option.name,
                action="store_false" if option.default else "store_true",
                help=option.help,
            )
        else:
            group.add_argument(
                option.flag,
                type=partial(_read, option),
                choices=option.choices or None,
                default=option.default,
                help=option.help,
            )


def _read(option: Option, text: str) -> object:
    try:
        value = option.kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"invalid {option.kind.__name__} value: {text!r}"
        ) from None
    if not option.allows(value):
        raise argparse.ArgumentTypeError(f"{text} is not {option.bound_in_words}")
    return value


def _version(text: str) -> str:
    if not VERSION.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text}: expected sha256: and 64 hex digits")
    return text


def _add_model(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--model",
        type=Path,
        help="a Hugging Face folder; org/name: fetched from a hub (HF_ENDPOINT); or into the model "
        "cache: hf:org/name@revision, s3://bucket/prefix; unset, with --join: the gateway's",
    )
    add("--version", type=_version, help="the digest that a model of the cache must have")
    add(
        "--model-cache",
        type=Path,
        default=Path("~/.cache/tollgate/models").expanduser(),
        metavar="FOLDER",
        help="where models are kept that are fetched (%(default)s)",
    )
    add(
        "--model-cache-bytes",
        type=int,
        default=DEFAULT_MAX_BYTES,
        help="what no process uses is removed beyond it (%(default)s)",
    )
    add(
        "--s3-endpoint",
        metavar="URL",
        help="of s3:, unset: Amazon's; keys and region as its clients find them (AWS_...)",
    )
    add("--revision", help="of a model on a hub: a branch, a tag or a commit; unset: its default")
    add(
        "--adapter",
        dest="adapters",
        type=_adapter,
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="a LoRA adapter in PEFT's folder, by the name that requests ask for; may be repeated",
    )
    add("--served-name", default="", help="the model's name; empty: the folder's or org/name")


def _add_process(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--usage-record",
        type=Path,
        metavar="FILE",
        help="counts what was generated where a kill -9 does not take it; unset: nowhere",
    )
    add(
        "--peer-listen",
        metavar="ADDRESS",
        help="where other engines of this model read KV blocks; unset: they cannot. With --join "
        "those that joined meet over tcp: by their certificates; tcp:0.0.0.0:0 is any free port",
    )
    add(
        "--peer-token-file",
        type=Path,
        metavar="FILE",
        help="what engines show each other before they read; needed for tcp: without --join",
    )
    add(
        "--kv-key-file",
        type=Path,
        metavar="FILE",
        help="at least 32 random bytes for --kv-disk-encrypted, that nobody else can read; a "
        "gateway hands its own engines a pipe",
    )
    add(
        "--drain-timeout-s",
        type=_no_less_than_0,
        default=DRAIN_TIMEOUT_S,
        help="after SIGTERM, how long requests may take to finish before they are aborted",
    )
    add(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="what goes to stderr",
    )
    add(
        "--log-format",
        choices=("human", "json"),
        default="human",
        help="lines for a person, or one JSON object a line as the gateway writes",
    )


def _adapter(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return name, Path(path)


def _no_less_than_0(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0 on")
    return value


if __name__ == "__main__":
    sys.exit(main())
