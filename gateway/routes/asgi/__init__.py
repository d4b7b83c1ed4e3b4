"""The ASGI layers around Litestar, which know no route."""
