"""The structs of Tollgate's own admin API."""
