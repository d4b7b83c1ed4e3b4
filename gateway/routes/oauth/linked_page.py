"""A page behind a link with a token that somebody was given: an invite, a new password, a sign-in.

A look at it uses nothing up, as programs read links before people do. Its form, which holds the
token, is good once and signs somebody in; so the page sends no referrer and keeps no copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from litestar import Request, Response, get
from redis.exceptions import RedisError

from gateway.auth.login.login import LoginOrigin, SignedIn
from gateway.auth.login.passwords import MIN_LENGTH, PasswordsBusy, WeakPassword
from gateway.auth.oauth.authorization import Authorization
from gateway.console.pages import CONSOLE
from gateway.routes.oauth.login import BUSY
from gateway.routes.shared.access import PUBLIC
from gateway.routes.shared.browser import (
    BadForm,
    Browser,
    FormRoute,
    auth_of,
    open_browser,
    page,
    read_sent,
    redirect,
    remembering,
    signed_in,
    stale_form,
)
from gateway.tenancy.errors import NotFound

T = TypeVar("T")


class FormRefused(Exception):
    """The form is shown again, with this said on it."""


class SentForm(NamedTuple):
    """Holds the form of such a page as a browser sent it."""

    auth: Authorization
    token: str
    fields: Mapping[str, str]
    where: LoginOrigin


class LinkedPage(ABC, Generic[T]):
    """Shows a page behind a link, and does what its form is for. `T`: what a good link is."""

    path: ClassVar[str]
    template: ClassVar[str]
    """The name of its template, to which its forms are bound as well."""
    closed: ClassVar[str]
    """Said where a link is not good, or not any more."""
    leads_to: ClassVar[str] = CONSOLE

    @abstractmethod
    async def find(self, auth: Authorization, token: str) -> T:
        """Raises: NotFound, RedisError: the link is not good."""

    @abstractmethod
    def shown(self, found: T, typed: Mapping[str, str]) -> dict[str, Any]:
        """Return what the template shows of it. `typed`: the form, where it is shown again."""

    @abstractmethod
    async def use(self, found: T, sent: SentForm) -> SignedIn:
        """Do what the link is for, once.

        Raises: FormRefused, WeakPassword, PasswordsBusy; NotFound, RedisError: the link is not good
        any more.
        """

    def routes(self) -> list[Any]:
        """Return the routes of the page and of its form."""

        @get(self.path, opt=PUBLIC, include_in_schema=False)
        async def show(request: Request[Any, Any, Any]) -> Response[bytes]:
            auth, token = auth_of(request), request.query_params.get("token", "")
            try:
                found = await self.find(auth, token)
            except (NotFound, RedisError):
                return self._refused()
            return self._page(auth, await open_browser(request), found, token)

        @FormRoute(self.path)
        async def use(request: Request[Any, Any, Any]) -> Response[bytes]:
            auth = auth_of(request)
            try:
                form, browser = await read_sent(request, self.template)
            except BadForm:
                return stale_form()
            token, status = form.get("token", ""), 400
            try:
                found = await self.find(auth, token)
                done = await self.use(found, SentForm(auth, token, form, browser.where))
            except (NotFound, RedisError):
                return self._refused()
            except (FormRefused, WeakPassword) as error:
                problem = str(error)
            except PasswordsBusy:
                problem, status = BUSY, 503
            else:
                return signed_in(redirect(self.leads_to), auth, done)
            again: dict[str, Any] = {"typed": form, "problem": problem, "status": status}
            return self._page(auth, browser, found, token, **again)

        return [show, use]

    def _page(
        self,
        auth: Authorization,
        browser: Browser,
        found: T,
        token: str,
        *,
        typed: Mapping[str, str] | None = None,
        problem: str | None = None,
        status: int = 200,
    ) -> Response[bytes]:
        response = page(
            self.template,
            status=status,
            action=self.path,
            problem=problem,
            token=token,
            min_length=MIN_LENGTH,
            form_token=auth.seals.form_token(browser.cookie, self.template),
            **self.shown(found, typed or {}),
        )
        return remembering(response, auth, browser)

    def _refused(self) -> Response[bytes]:
        return page("error", status=404, error="invalid_request", description=self.closed)
