"""A worker that takes up other settings: what changes is in force at once, and what is under way
ends as it began."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mcp.shared.exceptions import MCPError

from engine.errors import ConfigError
from gateway.app.live import LiveConfiguration
from gateway.settings.file import SettingsError
from gateway.settings.live import live_part
from gateway.settings.load import load
from tests.databases import Databases
from tests.gateway.fleet.upstream.scripted_upstream import Exchange, chunk, usage_chunk
from tests.gateway.routes.openapi.fresh import fresh_worker, mcp_client
from tests.gateway.routes.openapi.running import BOOK, TIMEOUT_S, Running
from tests.journeys.upstreams import good
from tests.mcp_bridge.counting import counting

NUM_STREAMS = 24
NUM_SWAPS = 8
SERVER = '[[mcp.servers]]\nname = "{name}"\nurl = "{url}"\nnetwork = "loopback"\ntrust = "all"\n'
SLO = "[slo]\nbatch = {ttft_s = 77, tpot_s = 7}\n"
BOOK_OF_EXTRA = BOOK.rpartition("[[price]]")[2].replace('"far"', '"extra"').join(("[[price]]", ""))


class Reloading:
    """A worker, and the file of its settings."""

    def __init__(self, worker: Running, folder: Path) -> None:
        self.worker, self.folder = worker, folder
        self.first = (folder / "tollgate.toml").read_text()

    @property
    def configuration(self) -> LiveConfiguration:
        found = self.worker.services.configuration
        assert isinstance(found, LiveConfiguration)
        return found

    def apply(self, text: str) -> None:
        """Take up what a file of this text says."""
        config = self.folder / "tollgate.toml"
        config.write_text(text)
        settings = load({"home": self.folder / "home", "config": config}, {})
        self.worker.run(self.configuration.apply(live_part(settings)))

    def with_far(self, more: str) -> str:
        """Return the first settings with more of the model `far`."""
        before, far = self.first.split('name = "far"\n')
        return f'{before}name = "far"\n{more}{far}'

    def chat(self, model: str, **more: Any) -> Any:
        return self.worker.session.post(
            f"{self.worker.url}/v1/chat/completions",
            json={"model": model, "messages": [{"role": "user", "content": "hi"}], **more},
            headers={"authorization": f"Bearer {self.worker.everything}"},
            timeout=TIMEOUT_S,
        )

    def far_url(self) -> str:
        return self.first.split('upstream = "')[1].split('"')[0]

    def num_retiring(self) -> int:
        gc.collect()
        return self.configuration._models._retirement.num_waiting


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def reloading(
    databases: Databases, redis_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reloading]:
    folder = tmp_path_factory.mktemp("live")
    with fresh_worker(databases, redis_server_url, folder) as worker:
        yield Reloading(worker, folder)


@pytest.fixture(autouse=True)
def as_at_first(reloading: Reloading) -> Iterator[None]:
    yield
    (reloading.folder / "book.toml").write_text(BOOK)
    reloading.worker.far.script = good
    reloading.apply(reloading.first)


def test_no_stream_is_cut_by_other_settings(reloading: Reloading) -> None:
    """Streams of both kinds are under way while their models are replaced again and again."""
    begun, release = threading.Semaphore(0), asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(chunk("Hel"))
        begun.release()
        await release.wait()
        await exchange.send(chunk("lo"), chunk(finish="stop"), usage_chunk(), "[DONE]")
        await exchange.end_stream()

    async def let_go() -> None:
        release.set()

    def stream(model: str) -> str:
        answer = reloading.chat(model, stream=True, max_tokens=9)
        assert answer.status_code == 200
        return str(answer.text)

    reloading.worker.far.script = script
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        far = [pool.submit(stream, "far") for _ in range(NUM_STREAMS)]
        for _ in range(NUM_STREAMS):
            assert begun.acquire(timeout=TIMEOUT_S)
        for number in range(NUM_SWAPS):
            reloading.apply(reloading.with_far(f"context_window = {1000 + number}\n"))
        assert reloading.num_retiring() >= 1, "the streams have what they began with"
        near = [pool.submit(stream, "near") for _ in range(4)]
        reloading.apply(reloading.first)
        assert not any(each.done() for each in far)
        reloading.worker.run(let_go())
        for each in (*far, *near):
            assert "[DONE]" in each.result(TIMEOUT_S) and "error" not in each.result()
    until(lambda: reloading.num_retiring() == 0)
    assert len(reloading.configuration._models._clients) == 1


def test_what_stays_the_same_is_the_same_object(reloading: Reloading) -> None:
    fleet = reloading.worker.services.generation.fleet
    before = {route.model: route for route in fleet.routes}
    reloading.apply(reloading.with_far("max_output_tokens = 77\n"))
    after = {route.model: route for route in fleet.routes}
    assert after["near"] is before["near"] and after["far"] is not before["far"]
    reloading.apply("[compat]\nunknown_fields = 'ignore'\n" + reloading.first.split("\n", 2)[2])
    assert all(route.ignores_unknown for route in fleet.routes)


def test_a_model_comes_with_its_price_and_goes(reloading: Reloading) -> None:
    services = reloading.worker.services
    assert reloading.chat("extra").status_code == 404
    extra = f'[[model]]\nname = "extra"\nupstream = "{reloading.far_url()}"\nmax_concurrency = 2\n'
    (reloading.folder / "book.toml").write_text(BOOK + BOOK_OF_EXTRA)
    reloading.apply(reloading.first + extra + "[deadlines]\ninteractive = 9.5\n" + SLO)
    assert services.generation.price_book.at("extra", time.time())
    assert services.generation.deadlines.interactive == 9.5
    assert services.generation.slos.of("extra", "batch").ttft_s == 77
    assert reloading.chat("extra").status_code == 200
    assert set(services.rooms) == {"extra"} and services.telemetry.label("extra") == "extra"
    reloading.apply(reloading.first)
    assert reloading.chat("extra").status_code == 404 and not services.rooms
    assert services.generation.deadlines.interactive != 9.5
    until(lambda: reloading.num_retiring() == 0)
    assert not reloading.configuration._models._own_rooms._rooms


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (
            '[[model]]\nname = "x"\nupstream = "http://h/v1"\napi_key_env = "NO_KEY"\n',
            SettingsError,
        ),
        ('[[model]]\nname = "x"\npath = "/nowhere"\nengine = "unix:/x.sock"\n', ConfigError),
        (
            SERVER.format(name="s", url="http://127.0.0.1:1/mcp")
            + 'credential = "user"\n[mcp.servers.oauth]\nclient_id = "c"\n'
            'client_secret_env = "NO_SECRET"\ntoken_endpoint = "https://h/t"\n'
            'authorization_endpoint = "https://h/a"\n',
            SettingsError,
        ),
    ],
)
def test_what_cannot_be_taken_up_changes_nothing(
    reloading: Reloading, more: str, error: type[Exception]
) -> None:
    fleet, models = reloading.worker.services.generation.fleet, reloading.configuration._models
    before, settings = fleet.routes, reloading.configuration.settings
    with pytest.raises(error):
        reloading.apply(reloading.with_far("max_output_tokens = 78\n") + more)
    assert fleet.routes == before and reloading.configuration.settings is settings
    assert len(models._clients) == 1 and reloading.num_retiring() == 0


def test_another_key_in_a_file_is_used_at_once(reloading: Reloading, tmp_path: Path) -> None:
    key, far = tmp_path / "key", reloading.worker.far
    text = reloading.with_far(f'api_key_file = "{key}"\n')
    for secret in ("sk-one", "sk-another"):
        key.write_text(f"{secret}\n")
        reloading.apply(text)
        assert reloading.chat("far").status_code == 200
        assert far.exchanges[-1].headers["authorization"] == f"Bearer {secret}"
    key.unlink()
    with pytest.raises(SettingsError, match=f"api_key_file: {key}: No such file"):
        reloading.apply(text)
    assert reloading.chat("far").status_code == 200


def test_mcp_servers_come_change_and_go(reloading: Reloading) -> None:
    """A call under way ends at the server that it went to; who listens hears of other lists."""
    worker = reloading.worker
    key = worker.everything

    async def tools() -> list[str]:
        async with mcp_client(worker, key) as client:
            return sorted(tool.name for tool in (await client.list_tools()).tools)

    async def change_amid_a_call(new: str, old: Any) -> None:
        async with mcp_client(worker, key) as client:
            call = asyncio.create_task(client.call_tool("one__hold", {"n": 1}))
            await asyncio.to_thread(old.holds.wait, TIMEOUT_S)
            await asyncio.to_thread(reloading.apply, new)
            assert not call.done()
            old.release.set()
            assert not (await call).is_error

    with counting() as one, counting() as other:
        first = reloading.first + SERVER.format(name="one", url=one.url)
        reloading.apply(first)
        assert "one__look" in asyncio.run(tools())
        moved = reloading.first + SERVER.format(name="one", url=other.url)
        asyncio.run(change_amid_a_call(moved, one))

        async def look() -> bool:
            async with mcp_client(worker, key) as client:
                try:
                    await client.call_tool("one__look", {"n": 1})
                except MCPError:
                    return False
            return True

        assert asyncio.run(look())
        assert (one.called, other.called) == (["hold"], ["look"])
        reloading.apply(reloading.first)
        assert not asyncio.run(look())
