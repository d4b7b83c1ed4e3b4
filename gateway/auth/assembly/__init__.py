"""Puts the parts of authentication together for one process, and takes them apart again."""
