"""Measures how long anybody waits for a lock while a database with a large table is migrated.

    python -m bench.migrations [--rows N] [--tables NAME ...] [--at FOLDER] [--dry]

For each of `tables.TABLES`, which migrations since the last release change: a throw-away Postgres
in a folder of --at with the schema of that release, --rows rows in the table, made by SQL, and then
this release's migrations; after them, as one more migration, every online change that reads the
whole table (a backfill goes a thousand rows at a time, however many there are, and is left out).
Meanwhile one client reads rows, one adds and changes some, and one, a report, keeps a transaction
open for a second and a half again and again: migrations have to wait for it, and others behind
them. `pg_locks` is looked at every 20 ms. Nobody may wait for a lock, and no migration may hold one
that keeps readers or writers out, for a second: else a recorded run ends with 1. The result goes to
`bench/results/`.
"""
