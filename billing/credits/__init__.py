"""Credits are paid in advance: grants, the leases on them that gateways spend from, and top-ups."""
