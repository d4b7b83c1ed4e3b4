"""A client metadata document as a client like any other.

Nobody vouched for such a client, so it is given what a stranger is given.
"""

from __future__ import annotations

import logging

from gateway.auth.errors import AuthUnavailable
from gateway.auth.oauth.clients.metadata_documents import (
    ClientDocumentError,
    ClientDocuments,
    ClientDocumentUnavailable,
)
from gateway.auth.oauth.clients.store import (
    Client,
    FetchDocument,
    from_metadata,
    scopes_of_a_stranger,
)

log = logging.getLogger(__name__)


def fetching(documents: ClientDocuments) -> FetchDocument:
    async def fetch(url: str) -> Client | None:
        """Raises: AuthUnavailable."""
        try:
            metadata = await documents.fetch_client(url)
        except ClientDocumentUnavailable as error:
            raise AuthUnavailable(f"a client metadata document: {error}") from error
        except ClientDocumentError as error:
            log.info("a client metadata document cannot be used: %s", error)
            return None
        return from_metadata(url, metadata, scopes_of_a_stranger(metadata))

    return fetch
