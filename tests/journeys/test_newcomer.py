"""A newcomer, from the wheel to an invoice: only what the wheel installs, and the commands of the
docs, in an empty folder."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from pydantic import BaseModel

from bench.tools.ports import free_port
from billing.invoices.closing import close
from gateway.db import create_engine
from gateway.home import Home
from gateway.processes.embedded_databases import postgres_url
from tests.deploy.environments import ROOT, installer
from tests.deploy.test_wheel import environment, folder, plain, wheel

__all__ = ["environment", "folder", "wheel"]
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
COMMAND_TIMEOUT_S = 120.0
A_MONTH = timedelta(days=32)


class Person(BaseModel):
    name: str
    age: int


class Newcomer:
    """Types commands in a folder, with what a login shell has and no more."""

    def __init__(self, environment: Path, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        (folder / "tollgate.toml").write_text(f"port = {self.port}\n")
        self.program = str(environment / "bin" / "tollgate")
        self.home = folder / ".tollgate"

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [self.program, *arguments],
            cwd=self.folder,
            env=plain(self.folder),
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout

    def rows(self, *arguments: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.run(*arguments, "--json").splitlines()]

    @property
    def credentials(self) -> dict[str, str]:
        found: dict[str, str] = json.loads((self.home / "credentials.json").read_text())
        return found

    @contextmanager
    def up(self) -> Iterator[str]:
        """Yield what `tollgate up` says until it is ready; Ctrl-C at the end."""
        output = self.folder / "up.log"
        with output.open("wb") as log:
            process = subprocess.Popen(
                [self.program, "up"],
                cwd=self.folder,
                env=plain(self.folder),
                stdout=log,
                stderr=log,
            )
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while "Ctrl-C" not in (said := output.read_text()):
                assert process.poll() is None and time.monotonic() < deadline, said
                time.sleep(0.1)
            yield said
        finally:  # the databases end with it, whatever the test did
            process.send_signal(signal.SIGINT)
            status = process.wait(STOP_TIMEOUT_S)
        assert status == 0, output.read_text()


def add_torch(environment: Path) -> None:
    """As `--torch-backend cpu` does, from what the tests have."""
    torch = (ROOT / "requirements" / "torch.txt").read_text().strip()
    uv = installer().Uv(environment)
    uv.install("--link-mode", "symlink", "--no-deps", f"{torch}+cpu")


async def end_the_month(home: Path, org_id: str) -> str:
    """Draft the invoice of this month, as a worker does when it has ended; return its id."""
    db = create_engine(postgres_url(Home(home)))
    try:
        draft = await close(db, org_id=org_id, now=datetime.now(UTC) + A_MONTH)
        assert draft is not None
        return draft.id
    finally:
        await db.dispose()


def card_command(said: str) -> str:
    """Return the card's curl, as it is pasted."""
    return "curl -sS" + said.partition("\ncurl")[2].partition("\n\n")[0]


@pytest.mark.slow
@pytest.mark.nightly
async def test_a_newcomer_comes_from_the_wheel_to_an_invoice(
    environment: Path, folder: Path
) -> None:
    add_torch(environment)
    me = Newcomer(environment, folder)
    assert me.run("--version").startswith("tollgate ")
    me.run("doctor")
    with me.up() as said:
        shell = ["/bin/sh", "-c", card_command(said)]
        answer = subprocess.run(shell, env=plain(folder), capture_output=True, check=True)
        assert json.loads(answer.stdout)["choices"][0]["finish_reason"] == "stop"
        org_id = await call_as_a_customer(me)
        draft = await end_the_month(me.home, org_id)
        assert me.run("billing", "finalize", "--org", "acme", draft) == (
            f"{draft} is invoice TG-000001.\n"
        )
        (listed,) = me.rows("invoices", "list", "--org", "acme")
        assert (listed["number"], listed["state"]) == ("TG-000001", "paid"), "of its credits"
        me.run("invoices", "get", "TG-000001", "--org", "acme", "-o", "invoice.pdf")
        assert (folder / "invoice.pdf").read_bytes().startswith(b"%PDF-")
        assert "The books balance." in me.run("reconcile")
        me.run("audit", "verify")
        me.run("status")


async def call_as_a_customer(me: Newcomer) -> str:
    """Make acme, call with its key, and find the calls in usage and costs. Return acme's id."""
    me.run("orgs", "create", "--name", "acme")
    me.run("projects", "create", "--org", "acme", "--name", "shop")
    made = ("keys", "create", "--org", "acme", "--project", "shop", "--name", "web", "--json")
    key = json.loads(me.run(*made))
    own = json.loads(me.run(*made, "--scope", "admin:*", "--scope", "usage:read"))["key"]
    (org_id,) = [row["id"] for row in me.rows("orgs", "list") if row["name"] == "acme"]
    base_url = f"http://127.0.0.1:{me.port}"
    async with httpx.AsyncClient(base_url=base_url, timeout=60) as http:
        bearer = {"authorization": f"Bearer {me.credentials['admin_key']}"}
        terms = {"params": {"org_id": org_id}, "headers": bearer}
        (await http.post("/v1/admin/billing-account", json={}, **terms)).raise_for_status()
    me.run("credits", "add", "acme", "100")
    me.run("budgets", "set", "50", "--per", "month", "--org", "acme")
    with OpenAI(base_url=f"{base_url}/v1", api_key=key["key"]) as client:
        counts = []
        for content in ("Hello!", "What is 2 + 3?"):
            asked: Any = [{"role": "user", "content": content}]
            said = client.chat.completions.create(model="penny", messages=asked)
            counts.append(said.usage)
        asked = [{"role": "user", "content": "Tom is 12 years old. Give name and age as JSON."}]
        parsed = client.chat.completions.parse(
            model="penny", messages=asked, response_format=Person
        )
        assert isinstance(parsed.choices[0].message.parsed, Person)
        counts.append(parsed.usage)
    deadline = time.monotonic() + COMMAND_TIMEOUT_S
    while True:
        used = me.rows("usage", "today", "--by", "model", "--key", own)
        if used and used[0]["num_model_requests"] == len(counts):
            break
        assert time.monotonic() < deadline, used
        time.sleep(0.5)
    assert used[0]["output_tokens"] == sum(each.completion_tokens for each in counts if each)
    assert sum(row["amount_usd"] for row in me.rows("costs", "today", "--key", own)) > 0
    return str(org_id)
