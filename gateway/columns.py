"""The columns that tables of the gateway are made of.

What is true of the database says its migration; nothing here makes a table.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY


def text(name: str, *, nullable: bool = False, key: bool = False) -> sa.Column[Any]:
    """Return a text column; key: of the primary key."""
    return sa.Column(name, sa.Text, nullable=nullable, primary_key=key)


def texts(name: str) -> sa.Column[list[str]]:
    return sa.Column(name, ARRAY(sa.Text), nullable=False)


def limits(names: Iterable[str]) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.BigInteger, nullable=True) for name in names]


def moment(name: str, *, nullable: bool = True) -> sa.Column[datetime]:
    return sa.Column(name, sa.TIMESTAMP(timezone=True), nullable=nullable)


def moment_made(name: str = "created_at") -> sa.Column[datetime]:
    """Return a column with the time of the transaction that adds the row, unless it says
    otherwise."""
    made = sa.TIMESTAMP(timezone=True)
    return sa.Column(name, made, nullable=False, server_default=sa.func.now())
