"""Documents to make tools of."""

from __future__ import annotations

from typing import Any

PETS_30: dict[str, Any] = {
    "openapi": "3.0.3",
    "info": {"title": "Pets", "version": "1"},
    "servers": [{"url": "https://elsewhere.example/"}],
    "paths": {
        "/pets": {
            "parameters": [{"$ref": "#/components/parameters/Trace"}],
            "get": {
                "operationId": "pets.list",
                "summary": "All pets",
                "parameters": [
                    {"name": "tags", "in": "query", "schema": {"type": "array", "items": {}}},
                    {
                        "name": "limit",
                        "in": "query",
                        "description": "How many",
                        "schema": {"type": "integer", "minimum": 0, "exclusiveMinimum": True},
                    },
                    {"name": "Authorization", "in": "header", "schema": {"type": "string"}},
                ],
                "responses": {
                    "200": {
                        "description": "fine",
                        "content": {
                            "application/json": {
                                "schema": {
                                    "type": "array",
                                    "items": {"$ref": "#/components/schemas/Pet"},
                                }
                            }
                        },
                    },
                    "default": {"description": "not"},
                },
            },
            "post": {
                "operationId": "addPet",
                "requestBody": {"$ref": "#/components/requestBodies/Pet"},
                "responses": {
                    "201": {
                        "description": "made",
                        "content": {
                            "application/json": {"schema": {"$ref": "#/components/schemas/Pet"}}
                        },
                    }
                },
            },
        },
        "/pets/{petId}": {
            "parameters": [
                {"name": "petId", "in": "path", "required": True, "schema": {"type": "string"}}
            ],
            "get": {"operationId": "getPet", "responses": {"200": {"description": "fine"}}},
            "put": {
                "operationId": "putPet",
                "requestBody": {
                    "content": {
                        "application/x-www-form-urlencoded": {
                            "schema": {"type": "object", "properties": {"name": {}}}
                        }
                    }
                },
                "responses": {"204": {"description": "done"}},
            },
            "delete": {"responses": {"204": {"description": "gone"}}},
            "patch": {
                "requestBody": {"content": {"application/octet-stream": {}}},
                "responses": {},
            },
        },
    },
    "components": {
        "parameters": {"Trace": {"name": "X-Trace", "in": "header", "schema": {"type": "string"}}},
        "requestBodies": {
            "Pet": {
                "required": True,
                "description": "The pet",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Pet"}}},
            }
        },
        "schemas": {
            "Pet": {
                "type": "object",
                "required": ["id", "name"],
                "properties": {
                    "id": {"type": "integer", "readOnly": True},
                    "name": {"type": "string", "nullable": True, "example": {"$ref": "nothing"}},
                    "password": {"type": "string", "writeOnly": True},
                    "mother": {"$ref": "#/components/schemas/Pet", "description": "ignored"},
                    "$ref": {"type": "string", "enum": ["a", {"$ref": "#/x"}]},
                },
                "xml": {"name": "pet"},
                "x-internal": True,
            }
        },
    },
}


def document(paths: dict[str, Any], version: str = "3.1.1", **more: Any) -> dict[str, Any]:
    return {"openapi": version, "info": {"title": "x", "version": "1"}, "paths": paths, **more}


def asking(*parameters: dict[str, Any], path: str = "/x", **operation: Any) -> dict[str, Any]:
    """A document of one operation, `ask`."""
    asked = {"operationId": "ask", "parameters": list(parameters), **operation}
    return document({path: {operation.pop("method", "get"): asked}})
