"""Puts the MCP bridge of one worker together: guard, meter, models and the HTTP endpoint."""
