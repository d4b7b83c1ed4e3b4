"""The web pages: rendered here, no build step, no script in a page."""
