"""The inference engine runs one model and serves it on a socket.

Knows token ids, not tenants, money or HTTP.
"""

import ctypes

SPIN_COUNT = 5000
"""How often a thread of torch's looks for work before it sleeps, some 100 us. libgomp's own is some
milliseconds: beside any other busy process a waiting thread then keeps the one it waits for off the
core, and each product takes a slice of the scheduler's. Measured on two cores beside one busy
process, a prompt of 512 tokens of SmolLM2-135M's shape: 0.4 s instead of 1.1; alone there is no
difference."""

# Read by libgomp when torch brings it in, so it stands here; whoever set it before is heard.
ctypes.CDLL(None).setenv(b"GOMP_SPINCOUNT", str(SPIN_COUNT).encode(), 0)
