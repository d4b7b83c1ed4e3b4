"""Keeps track of the KV cache's blocks: free, cached, leased or in use. Knows no tensors."""
