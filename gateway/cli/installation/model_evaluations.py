"""`tollgate models evaluate` and `evaluations`: what suites of evaluation said of versions."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import click

from foundation.periods import to_minute
from gateway.cli.installation.model_rollouts import models
from gateway.cli.installation.model_versions import VERSIONS, find, of_model
from gateway.cli.shared.tables import Column, Output, show, with_output
from gateway.cli.shared.target import ROWS, Gateway, GatewayError, examples, with_gateway

__all__ = ["models"]

EVALUATIONS = "/v1/admin/models/evaluations"
MAX_EVIDENCE = 4000
"""Characters of the end of what a suite wrote."""
ASKED = "{model}"
"""Stands in a command for the name of the served model that it is to ask."""
COLUMNS = (
    Column("MODEL", "model"),
    Column("VERSION", "version", "number"),
    Column("SUITE", "suite"),
    Column("PASSED", "passed", show=lambda row: "yes" if row["passed"] else "no"),
    Column("CREATED", "created_at", "time", show=lambda row: to_minute(row["created_at"])),
    Column("ID", "id", "id", gives_way=True),
)


@models.command(
    epilog=examples(
        "tollgate models evaluate qwen 2 --suite golden -- ./run-golden.sh {model}",
        "tollgate models evaluate qwen 2 --suite json -- python -m evals --model {model}",
    ),
)
@with_gateway
@click.option("--suite", required=True, help="Name of the suite, as the model's settings have it.")
@click.argument("model")
@click.argument("version", type=int)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
async def evaluate(
    gateway: Gateway, model: str, version: int, suite: str, command: tuple[str, ...]
) -> None:
    """Run COMMAND, and record that VERSION of MODEL passed if its exit status is 0.

    In it {model} stands for the name of the served model to ask. The end of what it writes is kept
    as evidence.
    """
    found = await find(gateway, VERSIONS, model, {"version": version}, f"version {version}")
    passed, evidence = await run([each.replace(ASKED, found["served_by"]) for each in command])
    body = {"model": model, "version": version, "suite": suite, "passed": passed}
    await gateway.send("POST", EVALUATIONS, {**body, "evidence": evidence})
    if not passed:
        raise GatewayError(f"version {version} of {model} did not pass {suite}", status=1)
    click.echo(f"Version {version} of {model} passed {suite}.")


@models.command(
    epilog=examples("tollgate models evaluations", "tollgate models evaluations qwen --json")
)
@with_gateway
@with_output
@ROWS
@click.argument("model", required=False)
async def evaluations(gateway: Gateway, rows: int, output: Output, model: str | None) -> None:
    """List what suites of evaluation said of the versions of MODEL, or of all models."""
    found = await gateway.rows(EVALUATIONS, rows, **of_model(model))
    show(found, COLUMNS, output, empty="No version was evaluated.")


async def run(command: Sequence[str]) -> tuple[bool, str]:
    """Run a suite, whose output is shown as it comes. Return whether it passed, and the end of what
    it wrote. Raises: GatewayError."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    except OSError as error:
        raise GatewayError(f"{command[0]} cannot be run: {error.strerror}", status=2) from error
    assert process.stdout is not None
    tail = b""
    while piece := await process.stdout.read(65536):
        sys.stdout.buffer.write(piece)
        sys.stdout.flush()
        tail = (tail + piece)[-4 * MAX_EVIDENCE :]
    passed = await process.wait() == 0
    return passed, tail.decode(errors="replace").replace("\0", "")[-MAX_EVIDENCE:]
