"""Serves the console's pages below `/console`, one module a page: they call the same verbs and
services as the admin API, with the rights of whoever is signed in. `frame` has what all share."""
