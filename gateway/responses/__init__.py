"""Responses and conversations that outlive their requests: kept sealed in Postgres, for a time.

Above: `gateway.routes.responses`, `gateway.routes.conversations`. Below: `gateway.wire` and
`gateway.inference`. Knows no HTTP.
"""
