"""The pages of sign-in and consent, rendered on the server: no build step, no script in a page."""
