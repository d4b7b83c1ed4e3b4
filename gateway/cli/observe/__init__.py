"""Commands that tell what happens and what happened: health and the audit log."""
