"""Runs hypothesis' state machines as one test each, also over a shared database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db import create_engine
from tests import budget
from tests.databases import Databases

T = TypeVar("T")


def run_machine(machine: Callable[[], RuleBasedStateMachine], *, examples: int, steps: int) -> None:
    """Real servers answer when they do: no example is too slow."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=budget.examples(examples),
            stateful_step_count=steps,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


class DatabaseMachine(RuleBasedStateMachine):
    """`db` holds what the example before has left."""

    def __init__(self, runner: asyncio.Runner, db: AsyncEngine) -> None:
        super().__init__()
        self._runner, self.db = runner, db

    def run(self, call: Callable[..., Coroutine[Any, Any, T]], *args: Any, **named: Any) -> T:
        return self._runner.run(call(*args, **named))


def run_over_database(
    machine: Callable[[asyncio.Runner, AsyncEngine], DatabaseMachine],
    databases: Databases,
    *,
    examples: int,
    steps: int,
) -> None:
    with asyncio.Runner() as runner:
        lent = runner.run(databases.lend())
        db = create_engine(databases.url(lent.name))
        try:
            run_machine(lambda: machine(runner, db), examples=examples, steps=steps)
        finally:
            runner.run(db.dispose())
            runner.run(databases.take_back(lent))
