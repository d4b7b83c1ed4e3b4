"""Lets engines of one model read each other's KV blocks.

    prefix --asked for--> hold at its owner --copy, checked--> pool

An engine listens for others on a socket of its own (`serving`): KV never travels on the one where
requests come. Whoever reads (`connection`) says what its KV is made of and which blocks it wants,
by their digests, which are salted; it is told where they are and the generation of each. On one
host it copies them out of the owner's memory, which it maps (`shared_pool`), between hosts they are
sent (`messages`), in the clear: only where an operator says so. Threads do that (`peers`), while
steps go on. A block whose generation changed while it was copied, whose checksum is wrong or that
does not come in time is computed.

Knows no tensors and no requests.
"""
