"""The console's pages about MCP: servers and pins, approvals, rules, taints, calls."""
