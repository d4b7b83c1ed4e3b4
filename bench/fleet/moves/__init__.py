"""Shows what it brings that requests which wait at one engine move to another one."""
