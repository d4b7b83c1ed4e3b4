"""Checks the shape of the tree: how full folders are, who imports whom, how things are named."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path, PurePath

from tests.test_tidy import ROOMS, ROOT, python_files, relative, tree_of

MAX_MODULES = 16
FULL_FOLDERS = {"migrations/versions": 1000}  # one file for each migration

# Modules shorter than this belong in the one module that imports them.
SHORT_LINES = 60
# Folders where each entry is a file of its own, by a recipe of engine/README.md.
FILES_BY_RECIPE = ("engine.kernels", "engine.models", "engine.text.output_parser.families")
SHORT_MODULES = {
    "engine.layers.embedding": "one file a layer; the decoder that imports them holds none",
    "engine.layers.norm": "one file a layer; the decoder that imports them holds none",
    "gateway.auth.oauth.rfc7009_revoke": "one file an RFC; its importer is the HTTP above it",
    "gateway.routes.asgi.head": "one file an ASGI layer; its importer wires them",
}

# All that the gateway may import of the engine. A name stands for what lies below it, too.
OF_THE_ENGINE = (
    "engine.errors",
    "engine.fairness",
    "engine.fake",
    # The hashes by which a home knows that an engine which joins has the same model.
    "engine.model_files",
    # Where models' files come from and are kept: the home brings them before it starts an engine.
    "engine.model_cache",
    # Pure data: the table that makes the keys of [engine] and the flags of an engine's process.
    "engine.options",
    # The keys by which engine and gateway name the spans of a prompt.
    "engine.prefix_digests",
    "engine.protocol",
    "engine.text",
    "engine.transport.client",
    # An engine that joins says other things than a gateway's client does, in the same frames.
    "engine.transport.entrance",
    # The files that it sends to engines, as these send them to each other.
    "engine.transport.file_ranges",
    "engine.transport.frames",
    # An engine that is lent joins another cell's home as engines of other machines do.
    "engine.transport.join_identity",
    "engine.transport.join_messages",
    "engine.transport.joining",
    "engine.transport.usage_record",
)

# One word that ends like a participle, or a pronoun, adverb or irregular participle, is no noun.
PARTICIPLE = re.compile(r"[A-Z][a-z]+(ed|ing)\b")
NO_NOUN = set(
    "About After Again All Also Any Anybody As Asks Away Back Before Begun Bound Built Each Else"
    " Fit Found Given Gone Grown Heard Held Here Hers His How Its Kept Known Later Laid Left Lent"
    " Lost Made Meant Mine Most Much Nobody None Nothing Now Often Once One Other Others Ours Paid"
    " Put Said Same Seen Sent Set Shown So Sold Some Somebody Spent Such Taken That Their Them Then"
    " There This Those Thrown Told Understood Unknown Unpaid Until Unwritten Void Wanted What When"
    " Where Which Who Whoever Whole Whose Written Yet Drawn Done Cut Read Chosen Broken Spoken"
    " Withdrawn Borne Borrowed Beside Alone Apart Forgotten".split()
)
NOUNS = {
    "Finding",
    "Reasoning",
    "Listing",
    "Embedding",
    "Setting",
    "Encoding",
    "Feed",
    "Funding",
    "Posting",
    "String",
    "Ring",
    "Billing",
    "Pricing",
    "Rating",
    "Rerating",
}

NO_SENTENCE = re.compile(r"(Of|What|Whose|Which|Where|Who|Whoever|Whatever)\b")
NO_FIELD_TEXT = re.compile(
    rf"{NO_SENTENCE.pattern}|(More|That|Whom)\b|(By|In|From|Under|Before|Or|Since|With) wh\w+\b"
)


def in_a_room(path: Path) -> bool:
    return relative(path).split("/")[0] in ROOMS


@cache
def modules() -> dict[str, Path]:
    """Return each module of the rooms by its dotted name; a package by that of its folder."""
    return {
        ".".join(PurePath(relative(p)).with_suffix("").parts).removesuffix(".__init__"): p
        for p in python_files()
        if in_a_room(p)
    }


def imported(tree: ast.Module) -> set[str]:
    """Return the dotted names that a module imports, each as far as it is a module."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.add(full if full in modules() else node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return names


@cache
def module_imports() -> dict[str, set[str]]:
    """Return which modules of the rooms each imports, wherever in its text it does so."""
    return {
        name: {other for other in imported(tree_of(path)) if other in modules()} - {name}
        for name, path in modules().items()
    }


@cache
def folder_imports() -> dict[tuple[str, str], list[str]]:
    """Return which folder imports which, with the imports that make it so.

    `__main__` is the entry of a process and belongs to no folder.
    """
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, path in modules().items():
        if path.stem == "__main__":
            continue
        here = relative(path.parent)
        for other in module_imports()[name]:
            if (there := relative(modules()[other].parent)) != here:
                found[here, there].append(f"{name} -> {other}")
    return found


def test_no_folder_is_a_heap() -> None:
    held = Counter(relative(p.parent) for p in python_files() if p.stem != "__init__")
    full = {k: n for k, n in held.items() if n > FULL_FOLDERS.get(k, MAX_MODULES)}
    assert full == {}


def test_folders_do_not_import_each_other() -> None:
    edges = folder_imports()
    pairs = {
        f"{a} <-> {b}": min(edges[a, b], edges[b, a], key=len)
        for a, b in edges
        if a < b and (b, a) in edges
    }
    assert pairs == {}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """An import inside a function or for types alone counts: it would only hide the circle."""
    circle: list[str] = []
    try:
        TopologicalSorter(module_imports()).prepare()
    except CycleError as error:
        circle = error.args[1]
    assert circle == []


def test_short_modules_belong_in_their_only_importer() -> None:
    importers = Counter(other for imports in module_imports().values() for other in imports)
    short = {
        name
        for name, path in modules().items()
        if importers[name] == 1
        and path.stem not in ("__init__", "__main__")
        and len(path.read_text().splitlines()) < SHORT_LINES
        and not name.startswith(tuple(f"{folder}." for folder in FILES_BY_RECIPE))
    }
    assert short - set(SHORT_MODULES) == set(), "fold them in, or join them with a sibling"
    assert set(SHORT_MODULES) - short == set(), "no longer short and alone: drop the exception"


def test_the_gateway_imports_of_the_engine_only_what_is_listed() -> None:
    others = {
        f"{name} -> {other}"
        for name, imports in module_imports().items()
        if name.split(".")[0] == "gateway"
        for other in imports
        if other.split(".")[0] == "engine"
        and not any(f"{other}.".startswith(f"{allowed}.") for allowed in OF_THE_ENGINE)
    }
    assert others == set()


def opening_without_a_verb(text: str) -> str | None:
    """Return the first sentence if it opens like a clause; None for others and for questions."""
    first = re.split(r"[.?!](?:\s|$)", text, maxsplit=1)[0]
    answered = text[len(first) : len(first) + 1] == "?"
    return first if NO_SENTENCE.match(text) and not answered else None


def test_docstrings_are_sentences() -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{relative(path)}:{1 if isinstance(node, ast.Module) else node.lineno}: {first}"
        for path in python_files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, documented)
        and (first := opening_without_a_verb(ast.get_docstring(node) or ""))
    ]
    assert found == []


def field_texts(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield each string that stands alone right below an assignment or annotation."""
    for node in ast.walk(tree):
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            for above, below in pairwise(block if isinstance(block, list) else []):
                if (
                    isinstance(above, ast.Assign | ast.AnnAssign)
                    and isinstance(below, ast.Expr)
                    and isinstance(below.value, ast.Constant)
                    and isinstance(below.value.value, str)
                ):
                    yield below.value


def test_texts_under_constants_and_fields_are_sentences() -> None:
    """A question is none either: nobody answers it there."""
    found = [
        f"{relative(path)}:{text.lineno}: {text.value}"
        for path in python_files()
        for text in field_texts(tree_of(path))
        if NO_FIELD_TEXT.match(str(text.value).strip())
    ]
    assert found == []


def test_a_class_name_is_defined_once_in_a_room() -> None:
    places: dict[str, dict[str, list[str]]] = {room: defaultdict(list) for room in ROOMS}
    for path in modules().values():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                places[relative(path).split("/")[0]][node.name].append(relative(path))
    for found in places.values():
        assert {name: where for name, where in found.items() if len(where) > 1} == {}


def test_classes_are_named_by_nouns() -> None:
    found = [
        f"{relative(path)}:{node.lineno}: {node.name}"
        for path in modules().values()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
        and (word := node.name.lstrip("_")) not in NOUNS
        and (PARTICIPLE.fullmatch(word) or word in NO_NOUN)
    ]
    assert found == []


def test_the_rules_are_about_this_tree() -> None:
    assert all((ROOT / folder).is_dir() for folder in FULL_FOLDERS)
    assert all(name in modules() for name in (*OF_THE_ENGINE, *FILES_BY_RECIPE))


def test_each_migration_follows_one_and_is_followed_by_one() -> None:
    """Two that were written side by side have another number each."""
    texts = [path.read_text() for path in (ROOT / "migrations" / "versions").glob("0*.py")]
    for name in ("revision", "down_revision"):
        found = [each for text in texts for each in re.findall(rf'^{name} = "(\d+)"$', text, re.M)]
        assert len(found) == len(set(found)) >= len(texts) - 1, sorted(found)[-3:]
