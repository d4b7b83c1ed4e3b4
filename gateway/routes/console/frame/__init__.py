"""The frame of the console's pages: their registry, requests, forms, answers and errors."""
