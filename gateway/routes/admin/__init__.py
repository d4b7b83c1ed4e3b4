"""The handlers of Tollgate's own admin API, `/v1/admin`."""
