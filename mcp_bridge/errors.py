"""The error tree of the bridge.

    BridgeError                 code
    ├── NameRefused             name_refused        a name that no alias can be made of
    ├── NotCanonical            not_canonical       RFC 8785 cannot write it (names its place)
    ├── NotPinnable             not_pinnable        no object, or one without its name
    ├── SchemaRefused           schema_refused      past the bounds, or no schema (names its place)
    ├── ValidationTimedOut      validation_timeout  the process that checks it was stopped
    ├── PolicyRefused           policy_refused      rules that cannot be used (names rule and field)
    └── ApprovalRefused         approval_refused    an approval that cannot be asked for

An expected outcome is a value instead: a `Finding`, a `Problem`, a `Change`, a `Decision`. A place
is a JSON pointer (RFC 6901); messages quote neither arguments nor results.
"""

from __future__ import annotations

from typing import ClassVar

from foundation.errors import CodedError, LocatedError


class BridgeError(CodedError):
    """Root of everything the bridge raises on purpose."""

    code: ClassVar[str] = "bridge_error"


class NameRefused(BridgeError):
    code = "name_refused"


class AtPath(BridgeError, LocatedError):
    """An error about one place of a JSON document; `param` is its pointer."""

    whole = "the document"


class NotCanonical(AtPath):
    code = "not_canonical"


class NotPinnable(AtPath):
    code = "not_pinnable"


class SchemaRefused(AtPath):
    code = "schema_refused"


class ValidationTimedOut(BridgeError):
    code = "validation_timeout"


class PolicyRefused(BridgeError):
    """The rules cannot be used.

    `rule` is the id of the rule, empty where it is about all of them.
    """

    code = "policy_refused"

    def __init__(self, rule: str, field: str, message: str) -> None:
        super().__init__(f"rule {rule!r}: {field}: {message}" if rule else f"{field}: {message}")
        self.rule = rule
        self.field = field
        self.message = message


class ApprovalRefused(BridgeError):
    code = "approval_refused"
