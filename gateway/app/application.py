"""Makes Litestar the framework of this gateway: with the routes that modules list, of which some
are registered late, and without what nobody uses here.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from pkgutil import walk_packages
from threading import Lock

from litestar import Litestar
from litestar.openapi.spec import OpenAPI
from litestar.plugins import PluginProtocol
from litestar.plugins.core import MsgspecDIPlugin
from litestar.types import ControllerRouterHandler

from foundation.imports import importing
from gateway import routes
from gateway.routes.asgi.late_routes import FOLDERS
from gateway.routes.shared.openapi import complete
from gateway.routes.shared.problem import PathFinder, path_finder

DOCUMENT = Lock()
"""It is made by one thread at a time."""
LATE = Lock()
"""Routes are registered by one thread at a time."""


class Application(Litestar):
    """Litestar without its plugins for bodies of pydantic and attrs, which nobody uses here: where
    pydantic is installed for another reason, each worker would load all of it. And with a document
    that is made when it is first asked for: a worker starts a fifth of a second earlier. And with
    the late routes once they are registered (`routes.asgi.late_routes`)."""

    has_late_routes = False

    def register_late_routes(self) -> None:
        """Register them, unless they are."""
        with LATE, importing():
            if not self.has_late_routes:
                for route in find_routes(late=True):
                    self.register(route)
                near_path_finder.cache_clear()
                self.has_late_routes = True

    @staticmethod
    def _get_default_plugins(plugins: list[PluginProtocol]) -> list[PluginProtocol]:
        return [*plugins, MsgspecDIPlugin()]

    @property
    def openapi_schema(self) -> OpenAPI:
        self.register_late_routes()
        with DOCUMENT:
            document = super().openapi_schema
            if document.components.responses is None:
                complete(document, self.routes)
        return document


def find_routes(*, late: bool) -> list[ControllerRouterHandler]:
    """Return the routes of all modules of `gateway.routes`, each of which lists its own as
    `routes`: the late ones, or all others."""
    names = [each.name for each in walk_packages(routes.__path__, "gateway.routes.")]
    wanted = [each for each in names if (each.split(".")[2] in FOLDERS) is late]
    return [route for name in wanted for route in getattr(import_module(name), "routes", ())]


@lru_cache(1)
def near_path_finder(app: Litestar) -> PathFinder:
    return path_finder(route.path for route in app.routes)
