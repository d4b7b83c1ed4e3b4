"""Recognizes credentials by their form, where they can be told from other texts.

Sessions, codes and passwords have no form: no text says that it is one.
"""

from __future__ import annotations

import re

CREDENTIAL = re.compile(
    r"sk-tg-(?:admin-)?[0-9A-Za-z]{43}"
    r"|tg-(?:secret|registration|refresh)-[\w-]{43}"
    r"|whsec_[0-9A-Za-z+/]{32,}={0,2}"
    r"|/invites/accept\?token=[\w-]+"
    r"|\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|\$argon2",
    re.ASCII,
)
"""An API key, what OAuth clients hold, the secret of a webhook, an invite's link, a JWT, a private
key, a hash."""
REDACTED = "[credential]"


def without_credentials(text: str) -> str:
    return CREDENTIAL.sub(REDACTED, text)
