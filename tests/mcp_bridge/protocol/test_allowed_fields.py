"""Messages are built of the members that their type and era have, whatever else was sent."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import given, settings
from hypothesis import strategies as st
from mcp_types import methods

from mcp_bridge.protocol import allowed_fields
from mcp_bridge.protocol.allowed_fields import (
    ANSWERS,
    CONTINUED,
    LEGACY_NOTIFICATIONS,
    NOTIFICATIONS,
    REQUESTS,
    RESULTS,
    answer_for_server,
    client_capabilities,
    for_server,
    from_server_error,
    from_server_notification,
    from_server_result,
    is_reserved,
    picked,
)
from mcp_bridge.protocol.eras import INTERACTIVE, LEGACY, MODERN
from mcp_bridge.protocol.questions import (
    ELICIT,
    ELICIT_FIELDS,
    FORM,
    ROOTS,
    SAMPLE,
    SAMPLE_FIELDS,
    URL,
    DeclinedQuestion,
    from_server_question,
    to_legacy_params,
    to_modern_questions,
)
from mcp_bridge.protocol.rpc import INTERNAL_ERROR, MISSING_CAPABILITY, URL_NEEDED
from mcp_bridge.protocol.translation import (
    server_capabilities,
    to_legacy_result,
    to_modern_notification,
    to_modern_result,
)
from tests.budget import examples

MANY = settings(max_examples=examples(400), deadline=None)
INFO = {"name": "t", "version": "1"}
SERVER_INFO = "io.modelcontextprotocol/serverInfo"
NOT_PASSED = {
    "tools/call": {"task"},
    "sampling/createMessage": {"task"},
    "elicitation/create": {"task"},
}
"""Members of tasks, which the bridge does not serve."""
NAMES = st.sampled_from(
    sorted(
        {
            *("resultType", "requestState", "inputRequests", "inputResponses", "ttlMs", "task"),
            *("cacheScope", "taskId", "protocolVersion", "capabilities", "jsonrpc", "id", "method"),
            *("result", "error", "params", "elicitationId", "mode", "url", "_meta", "x"),
            *(name for names in RESULTS.values() for name in names),
        }
    )
) | st.text(max_size=12)
META_NAMES = st.sampled_from(
    [
        *("io.modelcontextprotocol/subscriptionId", SERVER_INFO, "progressToken", "own", "a.b/c"),
        *("io.modelcontextprotocol/clientCapabilities", "com.mcp.x/y", "tollgate/provenance"),
    ]
) | st.text(max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)
METAS = st.none() | st.integers() | st.dictionaries(META_NAMES, VALUES, max_size=4)
MEMBERS = st.dictionaries(NAMES, VALUES, max_size=6)
METHODS = st.sampled_from(sorted(RESULTS))
ALL = {
    "elicitation": {"form": {}, "url": {}},
    "sampling": {"tools": {}, "context": {}},
    "roots": {},
}


def members(found: Any, part: str | None = None) -> set[str]:
    """The names of a wire type's members, or those of its `part`; of each of several types."""
    names: set[str] = set()
    for each in get_args(found) or (found,):
        if not hasattr(each, "model_fields"):
            continue
        if part is not None:
            names |= members(each.model_fields[part].annotation)
        else:
            fields = each.model_fields.items()
            names |= {field.alias or name for name, field in fields}
    return names - {"_meta"}


def test_the_lists_are_those_of_the_specification() -> None:
    modern = {"resultType", "ttlMs", "cacheScope", "inputRequests", "requestState"}
    for (method, version), found in methods.SERVER_RESULTS.items():
        if version in (LEGACY, MODERN) and method != "initialize":
            extra = modern if version == MODERN else set()
            assert members(found) - extra == set(RESULTS.get(method, ())), (method, version)
    for (method, version), kind in methods.CLIENT_REQUESTS.items():
        if version in (LEGACY, MODERN) and method != "initialize":
            names = set(REQUESTS.get(method, ())) | NOT_PASSED.get(method, set())
            if version == MODERN and method in INTERACTIVE:
                names |= set(CONTINUED)
            assert members(kind, "params") <= names, (method, version)
            assert names - members(kind, "params") <= {"task"}, (method, version)
    for table, version in ((LEGACY_NOTIFICATIONS, LEGACY), (NOTIFICATIONS, MODERN)):
        for method, allowed in table.items():
            kind = methods.SERVER_NOTIFICATIONS[method, version]
            assert members(kind, "params") == set(allowed), (method, version)
    asked = {
        SAMPLE: set(SAMPLE_FIELDS),
        ELICIT: {*ELICIT_FIELDS[FORM], *ELICIT_FIELDS[URL]},
        ROOTS: set(),
    }
    for method, allowed_here in asked.items():
        kind = methods.SERVER_REQUESTS[method, LEGACY]
        assert members(kind, "params") == allowed_here | NOT_PASSED.get(method, set())
    for method, names in ANSWERS.items():
        assert members(methods.CLIENT_RESULTS[method, LEGACY]) == set(names)


@MANY
@given(METHODS, MEMBERS, METAS, st.booleans())
def test_extra_members_of_a_result_mean_nothing_to_either_era(
    method: str, result: dict[str, Any], meta: Any, is_modern: bool
) -> None:
    sent = {**result, "_meta": meta}
    plain = from_server_result(method, picked(result, RESULTS[method]), modern=is_modern)
    kept = from_server_result(method, sent, modern=is_modern)
    assert picked(kept, RESULTS[method]) == plain
    modern = to_modern_result(method, kept, INFO)
    assert modern["resultType"] == "complete"
    assert not modern.keys() & {"requestState", "inputRequests", "task"}
    if not is_modern:
        assert modern.get("ttlMs", 0) == 0
    assert modern.get("cacheScope", "private") == "private"
    assert modern["_meta"][SERVER_INFO] == INFO
    assert not any(is_reserved(name) for name in modern["_meta"].keys() - {SERVER_INFO})
    legacy = to_legacy_result(method, kept)
    assert legacy.keys() <= {*RESULTS[method], "_meta"}
    assert not any(is_reserved(name) for name in legacy.get("_meta", {}))
    own = (
        {} if not isinstance(meta, dict) else {n: v for n, v in meta.items() if not is_reserved(n)}
    )
    assert legacy.get("_meta", {}) == own, "what is a server's own stays"


@MANY
@given(st.sampled_from([*LEGACY_NOTIFICATIONS, "notifications/x"]), MEMBERS, METAS, MEMBERS)
def test_extra_members_of_a_notification_mean_nothing(
    method: str, params: dict[str, Any], meta: Any, top: dict[str, Any]
) -> None:
    message = {**top, "jsonrpc": "2.0", "method": method, "params": {**params, "_meta": meta}}
    for legacy, table in ((True, LEGACY_NOTIFICATIONS), (False, NOTIFICATIONS)):
        found = from_server_notification(message, legacy=legacy)
        assert (found is None) == (method not in table)
        if found is not None:
            assert found.keys() <= {"jsonrpc", "method", "params"}
            said = found.get("params", {})
            assert said.keys() <= {*table[method], "_meta"}
            assert not any(map(is_reserved, said.get("_meta", {})))
    told = to_modern_notification(message, 7)
    if told is not None:
        assert told["params"]["_meta"]["io.modelcontextprotocol/subscriptionId"] == 7


@MANY
@given(st.sampled_from([ELICIT, SAMPLE, ROOTS]), MEMBERS, METAS, MEMBERS)
def test_extra_members_of_a_question_mean_nothing(
    method: str, params: dict[str, Any], meta: Any, top: dict[str, Any]
) -> None:
    request = {**top, "method": method, "params": {**params, "_meta": meta}}
    try:
        found = from_server_question(request, ALL)
    except DeclinedQuestion as error:
        assert error.reason == "malformed" and method == ELICIT
        return
    legacy, modern = to_legacy_params(found), to_modern_questions({"k": found})["k"]["params"]
    mode = params.get("mode", FORM)
    names = {SAMPLE: SAMPLE_FIELDS, ROOTS: ()}[method] if method != ELICIT else ELICIT_FIELDS[mode]
    assert found.keys() == {"method", "params"}
    assert legacy.keys() <= {*names, "_meta"}
    assert modern.keys() <= {*names, "_meta"} - {"elicitationId"}
    for said in (legacy, modern):
        assert not any(map(is_reserved, said.get("_meta", {})))


@MANY
@given(st.one_of(VALUES, st.fixed_dictionaries({"code": st.integers(-32900, -31900)}), MEMBERS))
def test_an_error_is_the_servers_own_in_its_own_era(error: Any) -> None:
    for modern in (False, True):
        found = from_server_error(error, modern=modern)
        assert -(2**31) < found.code < 2**31 and type(found.code) is int
        assert found.code not in {-32020, -32022, -32030, -32031, -32032, -32800}
        if found.code == MISSING_CAPABILITY:
            wanted = found.data["requiredCapabilities"]
            assert wanted and wanted.keys() <= ALL.keys()
        assert not modern or found.code != URL_NEEDED
        if found.code == INTERNAL_ERROR and isinstance(found.data, dict):
            assert not found.data.keys() & {"server", "reason", "url"}


@MANY
@given(st.sampled_from(sorted(REQUESTS)), MEMBERS, METAS)
def test_a_server_gets_the_parameters_of_its_era(
    method: str, params: dict[str, Any], meta: Any
) -> None:
    for modern in (False, True):
        found = for_server(method, {**params, "_meta": meta}, modern=modern)
        more = CONTINUED if modern and method in INTERACTIVE else ()
        assert found.keys() <= {*REQUESTS[method], *more, "_meta"}
        assert found.get("_meta", {}).keys() <= {"progressToken"}


@MANY
@given(st.sampled_from(sorted(ANSWERS)), MEMBERS, METAS)
def test_an_answer_has_the_members_of_what_was_asked(
    method: str, result: dict[str, Any], meta: Any
) -> None:
    found = answer_for_server(method, {"result": {**result, "_meta": meta}, "id": 1, "x": 2})
    assert found == {"result": picked(result, ANSWERS[method])}


@MANY
@given(st.lists(st.dictionaries(NAMES | st.sampled_from(["tools", "tasks"]), VALUES), max_size=3))
def test_capabilities_are_those_that_the_bridge_serves(found: list[dict[str, Any]]) -> None:
    for legacy in (False, True):
        said = server_capabilities(found, legacy=legacy)
        assert said.keys() <= allowed_fields.SERVER_CAPABILITIES.keys()
        for name, flags in said.items():
            assert flags.keys() <= set(allowed_fields.SERVER_CAPABILITIES[name])
    for each in found:
        assert client_capabilities(each).keys() <= {"elicitation", "sampling", "roots"}
