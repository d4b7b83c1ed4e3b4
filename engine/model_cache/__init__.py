"""Keeps models' files on this machine by digest: from a hub, S3 or a peer, verified, and bounded.

    CACHE/models/<digest>/           the files of a model that came whole, and were verified
    CACHE/models/<digest>.json       where they came from, and each one's SHA-256 (`cache`)
    CACHE/models/<digest>.lock       locked, shared, by each process that uses them
    CACHE/partial/<key>/             what has come of a model so far; <key>.lock: who brings it
    CACHE/cache.lock                 locked, for a moment, by who adds, takes or removes a model

Any number of processes of one machine share a cache. A model is brought by one of them while the
others wait; one that is killed leaves what has come, and the next goes on from there. Of what no
process uses, the models that were used least recently are removed when another one needs the room.

Knows neither torch nor what the files mean.
"""
