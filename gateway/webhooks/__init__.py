"""Sends events of an organization over HTTP to its endpoints and by e-mail to its people."""
