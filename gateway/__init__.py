"""The HTTP gateway: who sends a request, what it may do, what it asks for, and the answer."""
