"""Keeps KV blocks in host memory and on disk when the pool has no room, and brings back what pays.

    pool --second use--> disk           --asked for again--> pool
    pool --next to be evicted--> host   --asked for again--> pool

A block is written to disk when its prompt is met for the second time (`policy`), as one record of a
segment file (`segments`, `disk`), and to host memory before the pool evicts it (`host`), under the
digest that the prefix cache knows it by: digests are salted, so what is one organization's is found
by no other. What is read from disk is checked (layout, digest, CRC, or tag if it is encrypted)
before it gets near the pool; what fails, is late or was reclaimed is computed. A tier whose disk is
full or broken is off: nobody hears of it but the log. Other engines are asked in the same way
(`sources`).

Knows no sequences and no tensors.
"""
