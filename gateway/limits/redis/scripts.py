"""The limiter's Lua, ready to be called.

Scripts are known by the digest of their text, so gateways of two versions can share a Redis while
one replaces the other; a Redis that has forgotten a script is given it again.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError, ResponseError

from gateway.limits.redis.keys import org_of
from gateway.limits.redis.pipeline import Pipeline, QueueFull
from gateway.lru import Lru
from gateway.principal import PLAN_LIMITS

log = logging.getLogger(__name__)

NAMES = (
    *("admit", "book", "build", "debit", "exchange", "extend", "fund", "look"),
    *("release", "renew", "settle"),
)

SERVES_NOBODY = frozenset(
    "BUSY CLUSTERDOWN LOADING MASTERDOWN MISCONF NOAUTH NOPERM NOREPLICAS OOM READONLY".split()
)
"""Codes of errors that say of Redis that it takes no script of anybody's."""
SAY_AGAIN_S = 60.0
"""At least so long between two lines of the log on one script of one organization's, whose requests
may come by the thousand."""
MAX_SAID = 1024


class LimiterUnavailable(Exception):
    """Says that Redis did not answer, so nobody knows whether the request may pass."""


class ScriptFailed(LimiterUnavailable):
    """Says that Redis is there and serves others, but not this organization: a key of its own is of
    another type, say. Nobody knows what it has used, so its requests are refused."""


def script_text(name: str) -> str:
    folder = Path(__file__).parent
    requests = [f"{limit.letter} = 1" for limit in PLAN_LIMITS if limit.counts == "requests"]
    table = f"local ONE_REQUEST = {{{', '.join(requests)}}} -- by letter\n"
    return table + "".join((folder / f"{each}.lua").read_text() for each in ("ledger", name))


class Scripts:
    """The scripts on one Redis. `redis` must not decode responses. Each call may be repeated: ids
    make them idempotent.

    The first call that Redis does not answer, or refuses as it would anybody's (`SERVES_NOBODY`),
    opens the circuit: from then on calls fail at once, and `on_away` has been told. Only `probe`
    goes through, one at a time by whoever mends; `closed` lets all pass again. A call that fails
    for what its organization has in Redis opens nothing."""

    def __init__(
        self,
        redis: Redis,
        on_away: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pipeline = Pipeline(redis)
        self.is_away = False
        self._on_away = on_away
        self._clock = clock
        self._said: Lru[tuple[str, str], float] = Lru(MAX_SAID)
        """When it was last logged that a script, or command, fails for an organization."""
        self._encode = msgspec.msgpack.Encoder().encode
        self._texts = {name: script_text(name).encode() for name in NAMES}
        self._digests = {
            name: hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()
            for name, text in self._texts.items()
        }

    async def call(self, name: str, keys: Sequence[str], asked: Any) -> Any:
        """Run a script. `asked` goes over as msgpack. Raises: LimiterUnavailable, of it
        ScriptFailed."""
        if self.is_away:
            raise LimiterUnavailable(f"{name}: Redis is away")
        try:
            return await self.probe(name, keys, asked)
        except ScriptFailed:
            raise
        except LimiterUnavailable as error:
            if not self.is_away:
                self.is_away = True
                log.error("Redis runs no limiter script: %s", error)
                self._on_away()
            raise

    async def probe(self, name: str, keys: Sequence[str], asked: Any) -> Any:
        """Run a script as `call` does, whatever is known of Redis."""
        operands = (len(keys), *keys, self._encode(asked))
        try:
            try:
                return await self.pipeline.call((b"EVALSHA", self._digests[name], *operands))
            except NoScriptError:
                return await self.pipeline.call((b"EVAL", self._texts[name], *operands))
        except (RedisError, OSError, QueueFull) as error:
            raise self.failed(name, keys[0], error) from error

    def failed(self, name: str, key: str, error: Exception) -> LimiterUnavailable:
        """Return what it means that a script or command failed; logged where it is one
        organization's matter. `key`: the organization's, or nobody's."""
        found = unavailable(name, key, error)
        if isinstance(found, ScriptFailed):
            what, now = (name, org_of(key)), self._clock()
            said_at = self._said.get(what)
            if said_at is None or now - said_at >= SAY_AGAIN_S:
                self._said.put(what, now)
                log.error("%s fails for {%s}, which is refused: %s", *what, error)
        return found

    def closed(self) -> None:
        log.warning("Redis runs the limiter's scripts again")
        self.is_away = False


def unavailable(name: str, key: str, error: Exception) -> LimiterUnavailable:
    code = str(error).partition(" ")[0]
    if not isinstance(error, ResponseError) or code in SERVES_NOBODY or "{" not in key:
        return LimiterUnavailable(f"{name}: {type(error).__name__}")
    return ScriptFailed(f"{name} of {{{org_of(key)}}}: {code}")
