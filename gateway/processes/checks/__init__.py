"""Checks what keeps an installation from running, each by itself, and says what to do."""
