"""Keeps KV blocks on disk when the pool has no room, and reads them where that beats computing.

    pool --second use--> disk --asked for again--> pool

A block is written when its prompt is met for the second time (`policy`), as one record of a segment
file (`segments`, `disk`), under the digest that the prefix cache knows it by: digests are salted,
so what is one organization's is found by no other. What is read is checked (layout, digest, CRC)
before it gets near the pool; what fails, is late or was reclaimed is computed. A tier whose disk is
full or broken is off: nobody hears of it but the log.

Knows no sequences and no tensors.
"""
