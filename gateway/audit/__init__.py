"""Records who changed what, when and from where: an append-only log, chained by hashes per org."""
