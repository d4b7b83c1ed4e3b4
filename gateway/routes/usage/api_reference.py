"""Shows the API's document as an interactive reference at `/docs`: swagger-ui's files from here,
under a policy that lets the page ask this gateway alone."""

from __future__ import annotations

from functools import partial
from typing import Any

from litestar import Request, Response, get
from litestar.exceptions import NotFoundException

from gateway.console.pages import REFERENCE_ASSETS, guard_reference, read_file, render
from gateway.routes.shared.access import PUBLIC
from gateway.routes.shared.conditional import KeptContent
from gateway.routes.shared.media_types import HTML

ONE_HOUR = "public, max-age=3600"


@get("/docs", opt=PUBLIC, include_in_schema=False)
async def show_reference(request: Request[Any, Any, Any]) -> Response[bytes]:
    if request.scope["raw_path"].endswith(b"/"):  # what the page names is beside it
        headers = {"location": "../docs", **guard_reference()}
        return Response(b"", status_code=308, headers=headers)
    return Response(render("reference"), media_type=HTML, headers=guard_reference())


@get("/docs/assets/{name:str}", opt=PUBLIC, include_in_schema=False)
async def show_reference_asset(request: Request[Any, Any, Any]) -> Response[bytes]:
    kept = ASSETS.get(request.path_params["name"])
    if kept is None:
        raise NotFoundException
    return await kept.answer(request)


ASSETS = {
    name: KeptContent(partial(read_file, place), media_type, cache_control=ONE_HOUR)
    for name, (place, media_type) in REFERENCE_ASSETS.items()
}
routes = [show_reference, show_reference_asset]
