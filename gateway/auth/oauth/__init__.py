"""The OAuth 2.1 authorization server, a file for each RFC."""
