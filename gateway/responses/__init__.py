"""Responses and conversations that outlive their requests: kept sealed in Postgres, for a time.

Above: `gateway.routes.openai.responses`, `gateway.routes.openai.conversations`. Below: `gateway.wire` and
`gateway.inference.generate`. Knows no HTTP.
"""
