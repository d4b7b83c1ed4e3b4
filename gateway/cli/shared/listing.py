"""Makes the command that lists what the gateway has at one path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from gateway.cli.shared.tables import Column, Output, show, with_output
from gateway.cli.shared.target import ROWS, Gateway, with_gateway

Prepare = Callable[[list[dict[str, Any]]], None]
"""Adds to rows what columns show beside the answer's fields."""


def listing(
    path: str, columns: Sequence[Column], *, empty: str, newest_first: bool = False
) -> Callable[[Prepare], Callable[..., Any]]:
    """Make a list of the rows at `path` out of the function that prepares them, whose docstring is
    the command's help. `empty`: what is said where there are none."""

    def make(prepare: Prepare) -> Callable[..., Any]:
        @with_gateway
        @with_output
        @ROWS
        @wraps(prepare)
        async def list_(gateway: Gateway, rows: int, output: Output) -> None:
            order = {"order": "desc"} if newest_first else {}
            found = await gateway.rows(path, rows, **order)
            prepare(found)
            show(found, columns, output, empty=empty)

        return list_

    return make
