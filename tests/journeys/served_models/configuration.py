"""The settings of a Tollgate that serves models of every kind, some by scripted upstreams; and what
one of them costs."""

from __future__ import annotations

BIG_KEY = "sk-upstream-4f1c0ffee-very-secret"
BIG_PRICES = {"uncached_input": 1_250_003, "cache_read": 125_001, "cache_write": 1_562_507}
BIG_PRICES["output"] = 10_000_019
"""Pico-USD per token; no factor in common, so that a sum shows what it is made of."""
PRIORITY_TIMES = 3
"""As much for priority."""
BOOK = """
[[price]]
model = "big"
valid_from = "2026-01-01"
""" + "\n".join(f'{name} = "{pico / 10**6}"' for name, pico in BIG_PRICES.items())
BOOK += """
[[price]]
model = "big"
tier = "priority"
valid_from = "2026-01-01"
""" + "\n".join(f'{name} = "{PRIORITY_TIMES * pico / 10**6}"' for name, pico in BIG_PRICES.items())
CANARY = "canary-in-the-environment"
"""A secret of somebody's in the environment that no child of a Tollgate needs."""
CONFIG = """
price_books = [{books}]
[engine]
dtype = "float32"
num_blocks = 64
num_threads = 1

[[model]]
name = "penny"
path = "models/penny"
[[model]]
name = "big"
upstream = "{big}"
api_key_env = "BIG_KEY"
[[model]]
name = "wide"
  [[model.replica]]
  upstream = "{wide}"
  upstream_model = "Qwen3-32B"
  api_key_env = "BIG_KEY"
  weight = 2
  [[model.replica]]
  upstream = "{other}"
  upstream_model = "Qwen3-32B"
  api_key_env = "BIG_KEY"
[[model]]
name = "narrow"
upstream = "{narrow}"
max_concurrency = 2
[[model]]
name = "limited"
upstream = "{limited}"
{zoo}
[plan.default]  # one key asks for all, more in a moment than a key of everybody's may
tokens_per_minute = 1_000_000_000
requests_per_minute = 10_000
max_concurrent_streams = 256
[plan.tokens]
tokens_per_minute = 60_000
[plan.small]
tokens_per_minute = 300
[plan.requests]
requests_per_minute = 60
[plan.streams]
max_concurrent_streams = 2
"""
