"""The grants and tokens that the authorization server issues, and the keys that sign them."""
