"""Models that ship with Tollgate."""
