"""The spool is an append-only log on local disk that holds usage until Postgres has it."""
