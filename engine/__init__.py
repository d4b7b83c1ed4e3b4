"""The inference engine. Knows token ids, not tenants, money or HTTP."""
