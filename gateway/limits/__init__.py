"""Reserves from all limits of a request at once, or from none: in one Lua script, or from slices
that this process holds.

Knows no Litestar. What can be limited says `gateway.principal.PlanLimit`: buckets, headers, errors
and alerts are made of its entries, and nothing else here names one.
"""
