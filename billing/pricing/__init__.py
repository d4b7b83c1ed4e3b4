"""Pricing reads price books and multiplies quantities by prices; it does no other I/O."""
