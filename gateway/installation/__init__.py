"""Keeps settings that operators make by API, in Postgres beside the file, and merges both."""
