"""Logs people in at a browser: passwords, passkeys, sessions, and a throttle for guesses."""
