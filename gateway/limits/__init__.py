"""Reserves from all limits of a request in one Lua script, or from none, and settles in another.

Knows no Litestar. What can be limited says `gateway.principal.PlanLimit`: buckets, headers, errors
and alerts are made of its entries, and nothing else here names one.
"""
