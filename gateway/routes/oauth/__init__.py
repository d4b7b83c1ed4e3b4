"""The handlers of the authorization server: endpoints for clients, pages for people."""
