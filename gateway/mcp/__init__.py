"""The gateway's side of the MCP bridge: credentials, pins, rules, approvals, metering and audit of
an organization."""
