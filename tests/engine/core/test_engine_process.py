"""`python -m engine` as its supervisor and its gateways see it: a real process on a real socket,
with a tiny random Llama inside."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from engine.errors import EngineUnavailable, InvalidRequest
from engine.protocol import (
    EngineRequest,
    OrphanedUsage,
    ReplicaStatus,
    SamplingParams,
    Usage,
)
from engine.transport.client import EngineClient
from engine.transport.usage_record import Totals, read
from tests.engine import checkpoints
from tests.engine.peers import collect, until

ROOT = Path(__file__).resolve().parents[3]
START_TIMEOUT_S = 60.0
PROMPT = list(range(3, 40))
HIDDEN = checkpoints.SHAPE["hidden_size"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save("llama3", tmp_path_factory.mktemp("llama3"))


class Process:
    """One engine process after the other on the same address."""

    def __init__(self, model: Path, address: str, record: Path) -> None:
        self.address = address
        self._command = [sys.executable, "-m", "engine", "--model", str(model)]
        self._command += ["--listen", address, "--num-blocks", "256", "--num-threads", "1"]
        self._command += ["--drain-timeout-s", "1", "--usage-record", str(record)]
        self.running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.running = subprocess.Popen(self._command, cwd=ROOT, env=ENVIRONMENT)

    def send(self, signum: signal.Signals) -> None:
        assert self.running is not None
        self.running.send_signal(signum)

    async def exit_code(self) -> int:
        assert self.running is not None
        return await asyncio.to_thread(self.running.wait, 30)

    def kill(self) -> None:
        if self.running is not None:
            self.running.kill()
            self.running.wait(30)


@pytest_asyncio.fixture
async def process(model: Path, tmp_path: Path) -> AsyncIterator[Process]:
    process = Process(model, f"unix:{tmp_path}/engine.sock", tmp_path / "usage.record")
    process.start()
    yield process
    process.kill()


def ask(request_id: str, max_tokens: int = 400) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return EngineRequest(request_id=request_id, prompt_token_ids=PROMPT, sampling=sampling)


def idle(status: ReplicaStatus) -> bool:
    return (
        status.num_running == status.num_waiting == 0
        and status.num_free_blocks == status.num_blocks
        and status.generated_tokens > 0
    )


GATEWAY = """
    import asyncio, sys
    from engine.transport.client import EngineClient
    from engine.protocol import EngineRequest, SamplingParams

    async def main():
        client = await EngineClient.connect(sys.argv[1], timeout_s=30)
        sampling = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
        request = EngineRequest(
            request_id="orphan", prompt_token_ids=list(range(3, 40)), sampling=sampling
        )
        async for output in client.generate(request):
            print(output.usage.generated_tokens, flush=True)

    asyncio.run(main())
"""


async def test_what_a_killed_engine_had_generated_is_offered_by_the_next(
    process: Process, tmp_path: Path
) -> None:
    record, seen = tmp_path / "usage.record", Usage(prompt_tokens=0)
    client = await EngineClient.connect(process.address, timeout_s=START_TIMEOUT_S)
    await collect(client, ask("whole", max_tokens=5))
    await client.acknowledge("whole")
    with pytest.raises(EngineUnavailable):
        async for output in client.generate(ask("cut")):
            seen = output.usage
            if seen.generated_tokens >= 20:  # of a slow reader several come together
                process.send(signal.SIGKILL)
    assert await process.exit_code() == -signal.SIGKILL
    left = read(record)
    assert left.acknowledged == Totals(1, len(PROMPT), 0, 5)
    assert left.open["cut"].generated_tokens >= seen.generated_tokens >= 20
    await client.close()
    process.start()
    offered: list[OrphanedUsage] = []

    async def accept(orphan: OrphanedUsage) -> None:
        offered.append(orphan)

    client = await EngineClient.connect(
        process.address, timeout_s=START_TIMEOUT_S, on_orphan=accept
    )
    await until(lambda: not read(record).open)
    assert [(it.request_id, it.usage) for it in offered] == [("cut", left.open["cut"])]
    generated = left.open["cut"].generated_tokens + 5
    assert read(record).acknowledged.generated_tokens == generated
    await client.close()


async def test_a_killed_gateway_frees_its_blocks_and_its_usage_is_kept(process: Process) -> None:
    stays = await EngineClient.connect(process.address, timeout_s=START_TIMEOUT_S)
    gateway = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(GATEWAY), process.address],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
    )
    assert gateway.stdout is not None
    first = await asyncio.to_thread(gateway.stdout.readline)
    gateway.kill()
    seen = int([first, *gateway.stdout.read().splitlines()][-1])
    gateway.wait(30)
    gateway.stdout.close()
    await until(lambda: idle(stays.status), timeout_s=30)

    offered: list[OrphanedUsage] = []

    async def record(orphan: OrphanedUsage) -> None:
        offered.append(orphan)

    back = await EngineClient.connect(process.address, timeout_s=30, on_orphan=record)
    await until(lambda: bool(offered), timeout_s=30)
    usage = offered[0].usage
    assert offered[0].request_id == "orphan" and usage.prefilled
    assert usage.prompt_tokens == len(PROMPT)
    assert seen <= usage.generated_tokens < 400
    await collect(back, ask("another", 3))
    await back.acknowledge("another")
    await back.close()
    again = await EngineClient.connect(process.address, timeout_s=30, on_orphan=record)
    await collect(again, ask("one more", 3))
    assert len(offered) == 1
    await again.close()
    await stays.close()


async def test_a_killed_engine_is_known_at_once_and_its_successor_found(process: Process) -> None:
    client = await EngineClient.connect(process.address, timeout_s=START_TIMEOUT_S)
    before = client.status
    whole = [id_ for output in await collect(client, ask("a", 50)) for id_ in output.token_ids]
    assert whole == checkpoints.generate("llama3", PROMPT, 50)

    stream = client.generate(ask("b"))
    last = await anext(stream)
    process.send(signal.SIGKILL)
    with pytest.raises(EngineUnavailable):
        async with asyncio.timeout(30):
            async for last in stream:
                assert not last.finished
    assert last.usage.prefilled and last.usage.cached_tokens > 0
    with pytest.raises(EngineUnavailable):
        await collect(client, ask("c"))
    assert await process.exit_code() == -signal.SIGKILL

    process.start()  # on the socket that the dead one left behind
    after = await client.wait_connected(START_TIMEOUT_S)
    assert after.engine_id != before.engine_id
    again = [id_ for output in await collect(client, ask("d", 50)) for id_ in output.token_ids]
    assert again == whole
    await client.close()


async def test_embeddings_beside_a_text(process: Process) -> None:
    """Their usage, never acknowledged, is what a gateway's death leaves."""
    client = await EngineClient.connect(process.address, timeout_s=START_TIMEOUT_S)
    assert client.status.generates and client.status.embedding_size == HIDDEN
    speaking = asyncio.create_task(collect(client, ask("text", 100)))
    states = checkpoints.hidden("llama3", PROMPT)
    for i, (dimensions, cached_tokens) in enumerate(((None, 0), (7, 32), (HIDDEN, 32))):
        request = EngineRequest(
            request_id=f"e{i}",
            prompt_token_ids=PROMPT,
            embed=True,
            dimensions=dimensions,
            cache_salt="own",
        )
        (output,) = await collect(client, request)
        wanted = states[-1, :dimensions] / states[-1, :dimensions].norm()
        assert output.embedding is not None and output.usage.cached_tokens == cached_tokens
        found = np.frombuffer(output.embedding, "<f4")
        np.testing.assert_allclose(found, wanted.numpy(), rtol=0, atol=1e-5)
    with pytest.raises(InvalidRequest, match="dimensions must be between 1 and"):
        await collect(client, msgspec.structs.replace(request, dimensions=HIDDEN + 1))
    assert (await speaking)[-1].usage.generated_tokens == 100
    await client.close()
    orphans: dict[str, OrphanedUsage] = {}

    async def record(orphan: OrphanedUsage) -> bool:
        orphans[orphan.request_id] = orphan
        return True

    heir = await EngineClient.connect(process.address, timeout_s=START_TIMEOUT_S, on_orphan=record)
    await until(lambda: len(orphans) == 4)
    assert orphans["e1"].usage == output_usage(orphans["e1"], cached_tokens=32)
    await heir.close()


def output_usage(orphan: OrphanedUsage, *, cached_tokens: int) -> Usage:
    """Return the usage of an embedded PROMPT; times are as they were."""
    return msgspec.structs.replace(
        orphan.usage,
        prompt_tokens=len(PROMPT),
        cached_tokens=cached_tokens,
        generated_tokens=0,
        prefilled=True,
    )


async def test_sigterm_drains_and_exits_with_zero(process: Process) -> None:
    client = await EngineClient.connect(process.address, timeout_s=START_TIMEOUT_S)
    short = asyncio.create_task(collect(client, ask("short", 5)))
    long = client.generate(ask("long", 470))
    outputs = [await anext(long)]
    process.send(signal.SIGTERM)
    outputs += [output async for output in long]
    assert (await short)[-1].finish_reason == "length"
    assert outputs[-1].finish_reason in ("abort", "length")  # cut after --drain-timeout-s
    assert outputs[-1].finished and outputs[-1].usage.generated_tokens > 5
    assert await process.exit_code() == 0
    await client.close()


def run_engine(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engine", *arguments],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("listen", "broken", "message"),
    [
        ("http://x", False, "engine: address 'http://x': expected unix:/path or tcp:host:port"),
        ("tcp:0.0.0.0:9000", False, "engine: --listen tcp:0.0.0.0:9000: open to other machines"),
        ("unix:/nowhere/s", False, "engine: cannot listen on unix:/nowhere/s: "),
        ("unix:s", True, "engine: "),
    ],
)
def test_what_cannot_start_is_one_line_and_exit_code_two(
    model: Path, tmp_path: Path, listen: str, broken: bool, message: str
) -> None:
    folder = tmp_path if broken else model
    done = run_engine(
        "--model", str(folder), "--listen", listen, "--num-blocks", "64", "--log-level", "error"
    )
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_help_tells_every_option() -> None:
    done = run_engine("--help")
    assert done.returncode == 0
    for option in ("--model", "--listen", "--kv-cache-bytes", "--no-prefix-caching", "--seed"):
        assert option in done.stdout
    refused = run_engine("--model", "x", "--listen", "unix:/x", "--max-num-seqs", "0")
    assert refused.returncode == 2 and "0 is not positive" in refused.stderr
