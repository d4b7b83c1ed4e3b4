"""The parts of every command of `tollgate`: options, and one clear line for what went wrong.

Exit codes: 0 done; 1 something failed while running; 2 it cannot be done as asked.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from gateway.settings.file import SettingsError
from gateway.settings.load import Settings, load

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from sqlalchemy.ext.asyncio import AsyncEngine

UNPREPARED = ("42P01", "22023")
"""Postgres, appendix A: no such table; no such value, of the role that the connection asks for."""
FOLDER = click.Path(path_type=Path)


def with_options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Add options in the order in which `--help` shows them."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


STATE = (
    click.option("--home", type=FOLDER, help="Keep all state in this folder. Default: .tollgate"),
    click.option(
        "--config", type=FOLDER, help="Read settings from this TOML file. Default: tollgate.toml"
    ),
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")


def with_settings(command: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a command of a coroutine function: add the options STATE, and pass it the settings that
    they name before its own options. The errors that it raises by contract become one line."""

    @wraps(command)
    def invoke(home: Path | None, config: Path | None, **own: Any) -> None:
        run(command(load({"home": home, "config": config}), **own))

    for option in reversed(STATE):
        option(invoke)
    return invoke


def connections(settings: Settings) -> AbstractAsyncContextManager[tuple[AsyncEngine, Redis]]:
    """Open clients of both databases (`administration.connections`)."""
    from gateway.cli.shared import (
        administration,  # it imports SQLAlchemy, which `--help` does not need
    )

    return administration.connections(settings)


def refuse(error: Exception | str, *, status: int) -> NoReturn:
    """Print the error as one line and exit."""
    click.echo(f"tollgate: {' '.join(str(error).split()) or type(error).__name__}", err=True)
    sys.exit(status)


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a command's coroutine; what it may raise by contract becomes one line."""
    from sqlalchemy.exc import ProgrammingError, SQLAlchemyError

    from billing.errors import BillingError
    from gateway.home import HomeBusy, NoHome
    from gateway.net.listener import AddressError
    from gateway.processes.embedded_databases import EmbeddedError
    from gateway.processes.restarter import StartError
    from gateway.secret import SecretError
    from gateway.tenancy.errors import TenancyError
    from migrations.errors import MigrationError

    try:
        asyncio.run(work)
    except (HomeBusy, NoHome, AddressError, SecretError, SettingsError) as error:
        refuse(error, status=2)
    except (TenancyError, BillingError) as error:
        refuse(error, status=2)
    except SQLAlchemyError as error:
        if getattr(getattr(error, "orig", None), "sqlstate", None) in UNPREPARED:
            refuse("the database lacks Tollgate's tables: run `tollgate migrate` first", status=2)
        if isinstance(error, ProgrammingError):
            raise
        refuse(f"Postgres: {getattr(error, 'orig', None) or error}", status=1)
    except (StartError, EmbeddedError, MigrationError, OSError) as error:
        refuse(error, status=1)
