"""Reads the manifests of deploy/kubernetes for tests, and has other programs check them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
KUBECTL = shutil.which("kubectl")
BIN = Path(sys.executable).parent
OF_OTHERS = ("kustomize.config.k8s.io/", "monitoring.coreos.com/")
"""Kinds that Kubernetes has no schemas of."""
KINDS_OF_WORKLOADS = ("Deployment", "StatefulSet", "Job")
NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
LABELS = {"type": "object", "minProperties": 1, "additionalProperties": {"type": "string"}}


def closed(required: str, **properties: object) -> dict[str, object]:
    """Return the schema of an object with these properties alone."""
    return {
        "type": "object",
        "required": required.split(),
        "properties": properties,
        "additionalProperties": False,
    }


KUSTOMIZATION = closed(
    "apiVersion kind resources",
    apiVersion={"const": "kustomize.config.k8s.io/v1beta1"},
    kind={"const": "Kustomization"},
    resources={"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    labels={"type": "array", "items": closed("pairs", pairs=LABELS)},
    configMapGenerator={
        "type": "array",
        "items": closed("name files", name=NAME, files={"type": "array"}),
    },
    images={"type": "array", "items": closed("name", name=NAME, newTag={"type": "string"})},
    patches={
        "type": "array",
        "items": closed(
            "target patch",
            target=closed("kind name", kind={"type": "string"}, name=NAME),
            options=closed("", allowKindChange={"type": "boolean"}),
            patch={"type": "string"},
        ),
    },
)
"""The part of kustomize's Kustomization that the base uses."""


def read(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text())
    assert isinstance(found, dict)
    return found


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = workload["spec"]["template"]["spec"]
    return found


def container(workload: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod(workload)["containers"]
    return dict(found)


def labels_of(workload: dict[str, Any]) -> dict[str, str]:
    return dict(workload["spec"]["template"]["metadata"]["labels"])


def port_names(workload: dict[str, Any]) -> dict[str, int]:
    return {each["name"]: each["containerPort"] for each in container(workload)["ports"]}


def values(tree: Any, key: str) -> Iterator[Any]:
    """Yield what stands under `key` anywhere in `tree`."""
    for each in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from values(each, key)
    if isinstance(tree, dict) and key in tree:
        yield tree[key]


def check_schemas(*paths: Path) -> None:
    checked = subprocess.run(
        [BIN / "kubernetes-validate", "--strict", *paths],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def kubectl(*arguments: str, cwd: Path = ROOT) -> list[dict[str, Any]]:
    """Return the objects that kubectl prints. It asks no cluster."""
    done = subprocess.run(
        [str(KUBECTL), *arguments], cwd=cwd, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))
