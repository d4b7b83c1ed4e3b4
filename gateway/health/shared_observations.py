"""Shares among the workers of an installation what each saw of its upstreams, in one hash of Redis.

A worker that no request has led there yet so knows what the others know. A change is written within
seconds; nothing is asked of any upstream.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from redis.asyncio import Redis

from gateway.fleet.contact import Contact, Observation
from gateway.fleet.replica import ObservedReplica

KEY = "tollgate:observations"
KEPT_S = 24 * 60 * 60
"""Observations are kept this long after the last change of any upstream."""
ENCODER, DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Observation)


class SharedObservations:
    """`redis` must not decode responses."""

    def __init__(self, redis: Redis, replicas: Iterable[ObservedReplica]) -> None:
        self._redis = redis
        self._contacts: dict[bytes, Contact] = {
            each.identity.encode(): each.contact for each in replicas
        }

    async def exchange(self) -> None:
        """Write what was seen here since the last time, and learn what others saw.

        Raises: RedisError, OSError.
        """
        if not self._contacts:
            return
        stored = await self._redis.hmget(KEY, list(self._contacts))
        news: dict[Any, bytes] = {}
        for (identity, contact), value in zip(self._contacts.items(), stored, strict=True):
            known = self._decode(value)
            contact.heard(known)
            if contact.observation.seen_at > known.seen_at:
                news[identity] = ENCODER.encode(contact.observation)
        if news:
            await self._redis.hset(KEY, mapping=news)
            await self._redis.expire(KEY, KEPT_S)

    @staticmethod
    def _decode(stored: Any) -> Observation:
        if stored is None:
            return Observation()
        try:
            return DECODER.decode(stored)
        except msgspec.DecodeError:  # of another version
            return Observation()
