"""A client metadata document as a client like any other.

Above: `authorization`, which hands it to `Clients`. Below: `client_id_metadata`, which fetches and
reads documents; `client_metadata`, whose rules they have to keep too. Nobody vouched for such a
client, so it is given what a stranger is given.
"""

from __future__ import annotations

import logging

from gateway.auth.client_id_metadata import ClientDocumentError, ClientDocuments
from gateway.auth.client_metadata import (
    GRANT_TYPES_OF_STRANGERS,
    MAX_NAME_LENGTH,
    InvalidMetadata,
    from_document,
)
from gateway.auth.clients import Client, FetchDocument, from_metadata, scopes_of_a_stranger

log = logging.getLogger(__name__)


def fetching(documents: ClientDocuments) -> FetchDocument:
    async def fetch(url: str) -> Client | None:
        try:
            found = await documents.fetch_client(url)
            metadata = from_document(
                {
                    "client_name": (found.client_name or "")[:MAX_NAME_LENGTH].strip() or None,
                    "redirect_uris": list(found.redirect_uris),
                    "grant_types": sorted(GRANT_TYPES_OF_STRANGERS & set(found.grant_types)),
                    "token_endpoint_auth_method": found.token_endpoint_auth_method,
                    "scope": found.scope,
                    "jwks": found.jwks,
                    "jwks_uri": found.jwks_uri,
                }
            )
        except (ClientDocumentError, InvalidMetadata) as error:
            log.info("a client metadata document cannot be used: %s", error)
            return None
        return from_metadata(url, metadata, scopes_of_a_stranger(metadata))

    return fetch
