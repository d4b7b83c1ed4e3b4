"""Knows the pages of the console, and places them in the navigation: in the order of `GROUPS`, each
person those that are theirs. A page that is not there yet has no place."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.console.pages import CONSOLE
from gateway.console.ranges import DEFAULT
from gateway.permissions import SCOPE_ADMIN_READ, SCOPES, may
from gateway.principal import Principal

GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("", ("overview", "usage", "requests", "playground")),
    ("Manage", ("keys", "projects", "billing", "mcp")),
    ("Run", ("fleet", "audit", "webhooks", "settings")),
)
"""Names of pages."""


@dataclass(kw_only=True)
class PageEntry:
    """A page as the navigation knows it."""

    name: str
    """Its path below /console, and its place in GROUPS; empty: /console itself."""
    title: str
    letter: str = ""
    """`g` and this letter lead here."""
    needs: str = SCOPE_ADMIN_READ
    """The scope without which nobody sees it, nor its place in the navigation."""
    visible: Callable[[Principal], bool] | None = None
    """Tells who sees it, where that is more than one scope says."""
    badge: Callable[[Any], Awaitable[int]] | None = None
    """Counts, of a ConsoleRequest, what waits there for a person; shown beside its name. One cheap
    query."""
    in_any_org: bool = False
    """An operator may name another organization by `?org_id=`."""
    default_range: str = DEFAULT
    below: str = ""
    """The name of the page that is marked in the navigation, for one that hangs below it."""

    def __post_init__(self) -> None:
        assert self.needs in SCOPES, f"{self.needs}: nothing confers it"
        assert self.name not in PAGES, f"{self.name}: there are two"
        taken = {page.letter for page in PAGES.values()} - {""}
        assert self.letter not in taken, f"g {self.letter} leads to another page"
        PAGES[self.name] = self

    @property
    def path(self) -> str:
        return f"{CONSOLE}/{self.name}" if self.name else CONSOLE

    def is_for(self, principal: Principal) -> bool:
        if self.visible is not None:
            return self.visible(principal)
        return may_somewhere(principal, self.needs)


PAGES: dict[str, PageEntry] = {}
"""All pages by name."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    title: str
    path: str
    letter: str
    is_current: bool
    has_badge: bool


class PlaceGroup(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    places: list[Place]


def may_somewhere(principal: Principal, scope: str) -> bool:
    """Tell whether they may, in the organization or in a project that they own."""
    return may(principal, scope) or any(
        may(principal, scope, project_id=each) for each in principal.owned_projects
    )


def navigation_of(principal: Principal, here: PageEntry | None = None) -> list[PlaceGroup]:
    current = () if here is None else (here.name, here.below)
    groups = (
        PlaceGroup(
            title=title,
            places=[
                Place(
                    name=page.name,
                    title=page.title,
                    path=page.path,
                    letter=page.letter,
                    is_current=page.name in current,
                    has_badge=page.badge is not None,
                )
                for name in names
                if (page := PAGES.get(name)) is not None and page.is_for(principal)
            ],
        )
        for title, names in GROUPS
    )
    return [group for group in groups if group.places]
