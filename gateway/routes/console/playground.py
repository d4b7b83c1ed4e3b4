"""Shows /console/playground: somebody who is signed in asks models, on the road of all others.

    POST /console/playground/completions?payer=proj_...

takes what `POST /v1/chat/completions` takes and answers as that does, streamed or whole, with its
errors. Who asks is known by the session's cookie, and their page by its token; who pays is the key
that `payer` finds: it is that key's request, to its last token. Nothing of it is kept here: what is
written stays in the browser. Where that runs no script, the page's form is answered as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from litestar import Response, post
from litestar.types import ASGIApp, Message, Receive, Scope
from redis.exceptions import RedisError

from billing.events import Component, PriceSet
from billing.pricing.rating import price_of
from gateway.console.pages import guard_console
from gateway.fleet.replica import TemplatedReplica
from gateway.fleet.router import Route
from gateway.limits.counters import spent_now
from gateway.limits.spending import PICO_PER_NANO, counter_of
from gateway.permissions import ADMIN, may
from gateway.principal import SCOPE_INFERENCE, CapPeriod, Principal
from gateway.request_errors import BadField
from gateway.routes.console.frame.navigation import may_somewhere
from gateway.routes.console.frame.page import LOGIN, TOKEN_HEADER, ConsolePage
from gateway.routes.console.frame.request import PURPOSE, ConsoleRequest, FormProblem
from gateway.routes.console.payer import PAYER, find_payer
from gateway.routes.openai.inference import answer_chat
from gateway.routes.shared.access import PUBLIC, AuthenticatedRequest
from gateway.routes.shared.browser import (
    BadForm,
    auth_of,
    check_token,
    open_browser,
    refuse_other_sites,
)
from gateway.routes.shared.generation import parse_request
from gateway.routes.shared.request_state import REQUEST_ID
from gateway.tenancy.errors import NotAllowed
from gateway.tenancy.keys.console_keys import Payer, list_keys_to_pay, list_own_payers

COMPLETIONS = "/console/playground/completions"
LEFT = "/console/playground/left"
MAX_IMAGE_BYTES = 4 * 1024 * 1024
MAX_IMAGES = 8
"""The most that a browser sends with one message."""
SHOWN_PRICES: tuple[Component, ...] = (
    "uncached_input",
    "cache_read",
    "cache_write_5m",
    "output",
    "reasoning_output",
)
NUMBERS = ("temperature", "top_p", "max_tokens", "seed")


def may_play(principal: Principal) -> bool:
    """Tell whether they may have something to spend under."""
    return may(principal, SCOPE_INFERENCE) or may_somewhere(principal, f"{ADMIN}keys")


page = ConsolePage(name="playground", title="Playground", letter="p", visible=may_play)


class SignedOut(NotAllowed):
    status = 401
    code = "signed_out"


class StalePage(NotAllowed):
    code = "stale_page"


@post(COMPLETIONS, opt=PUBLIC, include_in_schema=False, status_code=200)
async def complete(request: AuthenticatedRequest) -> ASGIApp:
    """Raises: SignedOut, StalePage, NotFound, NotAllowed, and as the API does."""
    auth, browser = auth_of(request), await open_browser(request)
    if browser.session is None:
        raise SignedOut("session", "you are signed out: sign in again, what you wrote is kept")
    try:
        refuse_other_sites(request)
        check_token(auth, browser, request.headers.get(TOKEN_HEADER, ""), PURPOSE)
    except BadForm:
        raise StalePage(
            "page", "this page is too old: load it again, what you wrote is kept"
        ) from None
    chosen = request.query_params.get(PAYER, "")
    request.scope["user"] = await find_payer(request, browser, browser.session, chosen)
    return await answer_chat(request, await parse_request(request))


# ---- the page


class PlaygroundModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that can be asked, with what it takes. None: its upstream knows."""

    name: str
    is_ours: bool
    context: int | None
    takes_tools: bool | None
    takes_images: bool | None
    prices: dict[str, str] | None
    """Pico-USD a token, by component; None: it has no price."""


class Turn(msgspec.Struct, omit_defaults=True):
    """A message of a conversation that a form carries on."""

    role: str
    content: str


class FormAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Tells of the answer to a form: what it used and cost."""

    usage: Mapping[str, Any]
    cost: str
    request_id: str


class CapLeft(msgspec.Struct, frozen=True, kw_only=True):
    """Tells what is left of a payer's smallest cap. Pico-USD as texts."""

    amount: str
    left: str
    """Less what running requests hold."""
    period: CapPeriod
    resets_at: float | None
    """Unix seconds; None: never."""


class ScriptSetting(msgspec.Struct, frozen=True, kw_only=True):
    """Tells the page's script what it needs."""

    completions: str
    user: str
    payer: str
    api: str
    requests: str
    login: str
    left_at: str
    """The address that says anew what is left."""
    cap: CapLeft | None
    models: Sequence[PlaygroundModel]
    servers: Sequence[str]
    max_image_bytes: int = MAX_IMAGE_BYTES
    max_images: int = MAX_IMAGES


@page.get()
async def show(request: ConsoleRequest) -> Response[bytes]:
    return await draw(request, read_turns(request.form))


async def draw(
    request: ConsoleRequest, turns: Sequence[Turn], said: FormAnswer | None = None
) -> Response[bytes]:
    """Show the page. `said`: what its form was answered just now."""
    payers, chosen = await find_payers(request)
    cap = None if chosen is None else await cap_left(request, chosen)
    payer, models = ("", []) if chosen is None else (chosen.id, models_of(request, chosen))
    script = ScriptSetting(
        completions=COMPLETIONS,
        user=request.session.user_id,
        payer=payer,
        api=f"{request.auth.issuer}/v1",
        requests="/console/requests/",
        left_at=f"{LEFT}?{urlencode({PAYER: payer})}",
        cap=cap,
        login=f"{LOGIN}?next={quote(request.address(payer=payer), safe='')}",
        models=models,
        servers=[] if chosen is None else servers_of(request, chosen),
    )
    return request.render(
        "playground",
        payers=payers,
        chosen=chosen,
        cap=cap,
        models=models,
        servers=script.servers,
        script=msgspec.json.encode(script).decode(),
        turns=turns,
        messages=msgspec.json.encode(turns).decode(),
        said=said,
    )


async def find_payers(request: ConsoleRequest) -> tuple[list[Payer], Payer | None]:
    """Return all that somebody may spend under, and what they chose of it."""
    who = {"org_id": request.org_id, "user_id": request.session.user_id}
    async with request.transaction() as conn:
        payers = await list_own_payers(conn, **who) + await list_keys_to_pay(conn, **who)
    wanted = request.form.get(PAYER) or request.value(PAYER)
    first = payers[0] if payers else None
    return payers, next((each for each in payers if each.id == wanted), first)


async def cap_left(request: ConsoleRequest, payer: Payer) -> CapLeft | None:
    """Return what is left of a payer's cap, as the limiter counts; None: there is no cap."""
    if payer.cap is None:
        return None
    period, amount = payer.cap
    counter, taken = counter_of("key", payer.key_id or "", period, request.now.timestamp()), 0
    if payer.key_id is not None:
        with suppress(RedisError, OSError):
            found = await spent_now(request.redis, request.org_id, [counter])
            taken = found.get(counter, 0) * PICO_PER_NANO
    return CapLeft(
        amount=str(amount),
        left=str(max(0, amount - taken)),
        period=period,
        resets_at=None if counter.end is None else counter.end.timestamp(),
    )


@page.get("/left", renews=True)
async def show_left(request: ConsoleRequest) -> Response[bytes]:
    """Answer the page's script with what is left of the payer's cap."""
    _, chosen = await find_payers(request)
    cap = None if chosen is None else await cap_left(request, chosen)
    body = msgspec.json.encode(cap)
    return Response(body, media_type="application/json", headers=guard_console())


def models_of(request: ConsoleRequest, payer: Payer) -> list[PlaygroundModel]:
    found, now = request.services.generation, time.time()
    return [
        PlaygroundModel(
            name=route.model,
            is_ours=route.kind == "engine",
            context=route.max_model_len,
            takes_tools=takes_tools(route),
            takes_images=False if route.kind == "engine" else None,
            prices=prices_of(found.price_book.at(route.model, now, "default", payer.price_list)),
        )
        for route in found.fleet.routes
        if payer.may_use(route.model) and takes_chats(route)
    ]


def takes_chats(route: Route) -> bool:
    known = (each for each in route.replicas if isinstance(each, TemplatedReplica))
    return all(each.takes_chats for each in known)


def takes_tools(route: Route) -> bool | None:
    known = [each for each in route.replicas if isinstance(each, TemplatedReplica)]
    return all(each.takes_tools for each in known) if known else None


def prices_of(prices: PriceSet) -> dict[str, str] | None:
    """Return pico-USD as texts: a number of a script is exact to 2^53 alone."""
    found = {name: price_of(name, prices) for name in SHOWN_PRICES}
    return {
        name: str(price.pico_per_token) for name, price in found.items() if price is not None
    } or None


def servers_of(request: ConsoleRequest, payer: Payer) -> Sequence[str]:
    loops = request.services.tool_loops
    if loops is None or not payer.calls_tools:
        return ()
    return loops.toolbox.labels(
        org_id=request.org_id, project_id=payer.project_id, user_id=payer.user_id
    )


# ---- without a script


@page.post("", again=show, max_bytes=1024 * 1024)
async def ask(request: ConsoleRequest) -> Response[bytes]:
    """Answer the page's form as a whole."""
    http, person, form = request.http, request.user, request.form
    turns = read_turns(form)
    prompt = form.get("prompt", "").strip()
    if not prompt:
        raise BadField("Write something to ask first.", param="prompt")
    asked = [*turns, Turn("user", prompt)]
    body = msgspec.json.encode(to_body(form, asked))
    payer = await find_payer(http, request.browser, request.session, form.get(PAYER, ""))
    http.scope["headers"] = [*http.scope["headers"], (b"x-tollgate-cost", b"true")]
    http.scope["user"] = payer
    try:
        answer = await answer_chat(http, await parse_request(http, sent=body))
        status, told = await taken(answer, http.scope, http.receive)
        http.scope["user"] = person
        if status != 200:
            request.problem = FormProblem(told["error"]["param"], told["error"]["message"], status)
            return await show(request)
        request.form = {**form, "prompt": ""}
        said = said_of(told, http.scope["state"][REQUEST_ID])
        return await draw(request, [*asked, turn_of(told)], said)
    finally:
        http.scope["user"] = payer  # whose request it is, for the line that tells of it


def read_turns(form: Mapping[str, str]) -> list[Turn]:
    """Read the conversation that a form carries on. Raises: BadField."""
    try:
        return msgspec.json.decode(form.get("messages") or "[]", type=list[Turn])
    except msgspec.DecodeError:
        raise BadField(
            "The conversation cannot be read: begin a new one.", param="messages"
        ) from None


def to_body(form: Mapping[str, str], turns: Sequence[Turn]) -> dict[str, Any]:
    """Make the body of a chat completion of a form's fields, as the page's script does. Raises:
    BadField."""
    said = [msgspec.to_builtins(each) for each in turns]
    system = form.get("system", "").strip()
    body: dict[str, Any] = {"model": form.get("model", "")}
    body["messages"] = [{"role": "system", "content": system}, *said] if system else said
    for name in NUMBERS:
        if form.get(name, "").strip():
            body[name] = read_json(form, name)
    if form.get("tools", "").strip():
        body["tools"] = read_json(form, "tools")
    if form.get("schema", "").strip():
        schema = {"name": "answer", "strict": True, "schema": read_json(form, "schema")}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def read_json(form: Mapping[str, str], name: str) -> Any:
    """Raises: BadField."""
    try:
        return msgspec.json.decode(form[name])
    except msgspec.DecodeError as error:
        raise BadField(f"Invalid value for '{name}': not JSON: {error}.", param=name) from None


async def taken(answer: ASGIApp, scope: Scope, receive: Receive) -> tuple[int, Any]:
    """Return the status and the body of an answer in one piece."""
    status, pieces = 500, []

    async def keep(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            pieces.append(message["body"])

    await answer(scope, receive, keep)
    return status, msgspec.json.decode(b"".join(pieces))


def turn_of(told: Mapping[str, Any]) -> Turn:
    message = told["choices"][0]["message"]
    calls = message.get("tool_calls")
    written = msgspec.json.encode(calls).decode() if calls else ""
    return Turn("assistant", message.get("content") or written)


def said_of(told: Mapping[str, Any], request_id: str) -> FormAnswer:
    usage = told.get("usage") or {}
    cost = (usage.get("cost") or {}).get("amount", "")
    return FormAnswer(usage=usage, cost=cost, request_id=request_id)


routes = [complete, *page.routes]
