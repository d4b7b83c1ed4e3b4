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
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineStepFailed
from engine.text.hub import fetch, names_a_repository
from engine.transport.frames import parse_address
from engine.transport.server import EngineServer
from engine.transport.startup import Startup
from engine.transport.usage_record import UsageRecord

if TYPE_CHECKING:  # it imports torch, which a typo need not wait for
    from engine.core.engine_core import EngineCore

log = logging.getLogger("engine")

DRAIN_TIMEOUT_S = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr,
        level=arguments.log_level.upper(),
        format="%(asctime)s %(levelname)-8s %(name)s: %(message)s",
    )
    try:
        parse_address(arguments.listen)  # a typo is told before the weights are loaded
        startup = Startup()
        with startup.phase("hub"):
            _fetch_model(arguments)
        core = _load(_config(arguments), startup)
        with _record_at(arguments.usage_record) as record:
            server = EngineServer(core, arguments.listen, record)
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


def _fetch_model(arguments: argparse.Namespace) -> None:
    """A model that is named like one on a hub becomes the folder it was fetched to."""
    if not names_a_repository(arguments.model):
        if arguments.revision is not None:
            raise ConfigError(f"--revision is for a model on a hub; {arguments.model} is none")
        return
    name = str(arguments.model)
    arguments.served_name = arguments.served_name or name
    weights = arguments.load_format != "dummy"
    arguments.model = fetch(name, revision=arguments.revision, weights=weights).folder


def _load(config: EngineConfig, startup: Startup) -> EngineCore:
    with startup.phase("import"):
        from engine.core.engine_core import EngineCore

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
    default = EngineConfig(model=Path())
    _add_model(parser.add_argument_group("model"), default)
    _add_steps(parser.add_argument_group("steps"), default)
    _add_memory(parser.add_argument_group("memory"), default)
    _add_process(parser.add_argument_group("process"), default)
    return parser


def _add_model(group: argparse._ArgumentGroup, default: EngineConfig) -> None:
    add = group.add_argument
    add(
        "--model",
        type=Path,
        required=True,
        help="a Hugging Face folder, or org/name: fetched from a hub (HF_ENDPOINT)",
    )
    add("--revision", help="of a model on a hub: a branch, a tag or a commit; unset: its default")
    add(
        "--load-format",
        choices=("safetensors", "dummy"),
        default=default.load_format,
        help="dummy: random weights from config.json alone, for benchmarks",
    )
    add(
        "--quantization",
        choices=("none", "int8", "fp8"),
        default=default.quantization,
        help="what dense linear layers become when they are loaded; a quantised checkpoint stays",
    )
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
    add("--device", choices=("auto", "cpu", "cuda"), default=default.device, help="where to run")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default=default.dtype,
        help="auto: the checkpoint's, but float32 for a small model on a CPU",
    )
    add(
        "--deterministic",
        action="store_true",
        help="the same logits, to the bit, alone and in any batch; slower",
    )
    add("--max-model-len", type=_positive, help="context length; unset: the checkpoint's")
    add("--seed", type=int, default=default.seed, help="for requests that bring no seed")


def _add_steps(group: argparse._ArgumentGroup, default: EngineConfig) -> None:
    add = group.add_argument
    add(
        "--max-num-batched-tokens",
        type=_positive,
        default=default.max_num_batched_tokens,
        help="budget of one step, prefill and decode together",
    )
    add(
        "--max-num-seqs",
        type=_positive,
        default=default.max_num_seqs,
        help="sequences running at once",
    )
    add(
        "--max-waiting",
        type=_positive,
        default=default.max_waiting,
        help="requests queued in a lane before more of it are refused",
    )
    add(
        "--itl-target-s",
        type=_no_less_than_0,
        default=default.itl_target_s,
        help="how long a step with decodes should take at most; prompt chunks are sized for it. "
        "0: no target",
    )
    for lane in ("agentic", "batch"):
        add(
            f"--{lane}-max-waiting",
            type=_positive,
            help=f"of lane {lane}; unset: --max-waiting",
        )
        add(
            f"--{lane}-max-share",
            type=_fraction,
            default=getattr(default, f"{lane}_max_share"),
            help=f"of --max-num-seqs, and of a step beside higher lanes: most for lane {lane}",
        )
        add(
            f"--{lane}-kv-headroom",
            type=_headroom,
            default=getattr(default, f"{lane}_kv_headroom"),
            help=f"KV blocks that lane {lane} leaves to higher lanes when it starts something",
        )
    add(
        "--speculative",
        choices=("off", "grammar", "ngram", "draft"),
        default=default.speculative,
        help="grammar: guess what a grammar leaves no choice about; ngram: that, and that what "
        "followed the last tokens before follows them again; draft: guess what --draft-model says",
    )
    add("--draft-model", type=Path, help="a folder: a smaller model with the same vocabulary")
    add(
        "--num-draft-tokens",
        type=_positive,
        default=default.num_draft_tokens,
        help="guesses verified in a step, for each sequence",
    )


def _add_memory(group: argparse._ArgumentGroup, default: EngineConfig) -> None:
    add = group.add_argument
    add("--kv-cache-bytes", type=_positive, help="KV memory; unset: --kv-cache-fraction")
    add(
        "--kv-cache-fraction",
        type=_fraction,
        default=default.kv_cache_fraction,
        help="KV memory as a part of what is free once the weights are loaded",
    )
    add(
        "--kv-cache-dtype",
        choices=("auto", "fp8"),
        default=default.kv_cache_dtype,
        help="what keys and values are stored as. auto: the model's dtype",
    )
    add("--num-blocks", type=_positive, help="KV blocks; overrides both of the above")
    add(
        "--no-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="compute every prompt in full",
    )
    add(
        "--cache-lease-share",
        type=_share,
        default=default.cache_lease_share,
        help="KV blocks that one tenant may have kept for a time, of all; 0: nothing is kept",
    )
    add(
        "--poison-freed-blocks",
        action="store_true",
        help="overwrite freed KV blocks with NaN, to find who reads them; slow",
    )


def _add_process(group: argparse._ArgumentGroup, default: EngineConfig) -> None:
    add = group.add_argument
    add("--listen", required=True, metavar="ADDRESS", help="unix:/path or tcp:host:port")
    add("--num-threads", type=_positive, help="CPU threads for matrix work; unset: torch's choice")
    add(
        "--step-timeout-s",
        type=_seconds,
        help="longer than any step; an engine silent for so long is given up, and killed when it "
        "was silent twice as long. Unset: derived from the model's size",
    )
    add(
        "--usage-record",
        type=Path,
        metavar="FILE",
        help="counts what was generated where a kill -9 does not take it; unset: nowhere",
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


def _adapter(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return name, Path(path)


def _positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 1 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 1 on")
    return value


def _no_less_than_0(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0 on")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


def _share(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 0 and at most 1")
    return number


def _headroom(text: str) -> float:
    number = float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 0 and below 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
