"""The playground of the console: somebody who is signed in asks a model, on the road of all others.

    POST /console/playground/completions?payer=proj_...

takes what `POST /v1/chat/completions` takes and answers as that does, streamed or whole, with its
errors. Who asks is known by the session's cookie, and their page by its token; who pays is the key
that `payer` finds: it is that key's request, to its last token. Nothing of it is kept here.
"""

from __future__ import annotations

from litestar import post
from litestar.types import ASGIApp

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
from gateway.tenancy.errors import NotAllowed

COMPLETIONS = "/console/playground/completions"
PURPOSE = "playground"
"""The page's token is bound to it."""
TOKEN_HEADER = "x-form-token"


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
        raise StalePage("page", "this page is too old: load it again") from None
    chosen = request.query_params.get(PAYER, "")
    request.scope["user"] = await find_payer(request, browser, browser.session, chosen)
    return await answer_chat(request, await parse_request(request))


routes = [complete]
