"""Tells how each part is that requests depend on: the spool, the stores, engines and upstreams."""
