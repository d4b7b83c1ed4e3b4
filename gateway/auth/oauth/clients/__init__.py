"""OAuth clients: registered ones, and those that publish a metadata document."""
