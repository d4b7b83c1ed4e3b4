"""Who changed what, when and from where: an append-only log, chained per org."""
