"""What the authorization server issues: grants, tokens, and the keys that sign them."""
