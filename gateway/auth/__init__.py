"""Authentication: who sends a request, by a credential, a login or a foreign token."""
