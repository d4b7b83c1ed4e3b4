"""`tollgate reconcile` on a real home: 0 where the books balance, and 1 where they do not."""

from __future__ import annotations

from tests.gateway.cli.test_audit import on_database
from tests.gateway.cli.test_main import environ, folder, invoke

__all__ = ["environ", "folder"]


def test_books_that_balance_are_said_so_and_what_does_not_is_named(
    environ: dict[str, str],
) -> None:
    assert invoke(environ, "migrate").exit_code == 0
    elsewhere = {name: value for name, value in environ.items() if name != "TOLLGATE_HOME"}
    whole = invoke(elsewhere, "reconcile", "--home", environ["TOLLGATE_HOME"])
    assert (whole.exit_code, whole.output) == (0, "The books balance.\n")
    on_database(environ, "INSERT INTO accounts (id) VALUES ('receivable:org_x')")
    on_database(
        environ,
        "INSERT INTO balances (account, debits_pico, credits_pico) "
        "VALUES ('receivable:org_x', 7, 0)",
    )
    broken = invoke(environ, "reconcile")
    assert broken.exit_code == 1
    assert set(broken.output.splitlines()) == {
        "all accounts: the sum of all debits differs from the sum of all credits",
        "receivable:org_x: the balance differs from the sum of its entries",
    }
