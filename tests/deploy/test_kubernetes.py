"""deploy/kubernetes: against the schemas of Kubernetes, and that its parts fit together.

No cluster is needed: what a manifest refers to is looked up in the others, in the command line and
in the settings. Where kubectl is installed, it builds what it would apply.
"""

from __future__ import annotations

import re
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from gateway.settings.load import Settings, load
from tests.deploy.manifests import (
    BIN,
    KINDS_OF_WORKLOADS,
    KUBECTL,
    KUSTOMIZATION,
    LABELS,
    NAME,
    OF_OTHERS,
    ROOT,
    check_schemas,
    closed,
    container,
    kubectl,
    labels_of,
    pod,
    port_names,
    read,
    values,
)

BASE = ROOT / "deploy" / "kubernetes" / "base"
KEPT_SPOOL = ROOT / "deploy" / "kubernetes" / "kept-spool" / "kustomization.yaml"
DURATION = "^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?)$"


SERVICE_MONITOR = closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "monitoring.coreos.com/v1"},
    kind={"const": "ServiceMonitor"},
    metadata=closed("name", name=NAME, labels=LABELS),
    spec=closed(
        "selector endpoints",
        selector=closed("matchLabels", matchLabels=LABELS),
        endpoints={
            "type": "array",
            "minItems": 1,
            "items": closed(
                "port",
                port=NAME,
                path={"type": "string", "pattern": "^/"},
                interval={"type": "string", "pattern": DURATION},
                scrapeTimeout={"type": "string", "pattern": DURATION},
            ),
        },
    ),
)
"""The part of the Prometheus operator's ServiceMonitor (v1) that the base uses."""
KUSTOMIZED = read(BASE / "kustomization.yaml")
MANIFESTS = {name: read(BASE / name) for name in KUSTOMIZED["resources"]}


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [each for each in MANIFESTS.values() if each["kind"] == kind]


WORKLOADS = [each for kind in KINDS_OF_WORKLOADS for each in of_kind(kind)]


def selected(labels: dict[str, str]) -> dict[str, Any]:
    """Return the only workload whose pods have these labels."""
    (found,) = [each for each in WORKLOADS if labels.items() <= labels_of(each).items()]
    return found


def read_settings() -> Settings:
    environ = {
        each["name"]: each.get("value", {"database-url": "postgresql://u:p@db/t"}.get(secret, ""))
        for each in container(selected({"app.kubernetes.io/component": "gateway"}))["env"]
        for secret in [each.get("valueFrom", {}).get("secretKeyRef", {}).get("key")]
    }
    return load({"config": str(BASE / "tollgate.toml")}, environ)


def test_the_manifests_match_the_schemas_of_kubernetes() -> None:
    own = [name for name, each in MANIFESTS.items() if not each["apiVersion"].startswith(OF_OTHERS)]
    assert len(own) >= 7
    check_schemas(*(BASE / name for name in own))


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")
@pytest.mark.parametrize("folder", ["base", "kept-spool", "monitoring"])
def test_kubectl_builds_what_matches_the_schemas_of_kubernetes(folder: str, tmp_path: Path) -> None:
    built = kubectl("kustomize", f"deploy/kubernetes/{folder}")
    names = {(each["kind"], each["metadata"]["name"]) for each in built}
    assert len(names) == len(built)
    known = [each for each in built if not each["apiVersion"].startswith(OF_OTHERS)]
    for number, each in enumerate(known):
        (tmp_path / f"{number}.yaml").write_text(yaml.safe_dump(each))
    check_schemas(*sorted(tmp_path.iterdir()))
    for workload in (each for each in known if each["kind"] in KINDS_OF_WORKLOADS):
        mounted = values(pod(workload).get("volumes", []), "configMap")
        assert {("ConfigMap", each["name"]) for each in mounted} <= names
        assert container(workload)["image"] == f"tollgate:{KUSTOMIZED['images'][0]['newTag']}"
    kept = ("StatefulSet", "tollgate-gateway") in names
    assert kept == (folder == "kept-spool")
    assert kept or folder == "monitoring" or ("Deployment", "tollgate-gateway") in names


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")
def test_the_documented_secrets_are_the_ones_that_the_manifests_ask_for(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "deployment.md").read_text().replace("\\\n", "")
    asked = {each["key"] for each in values(list(MANIFESTS.values()), "secretKeyRef")}
    for name in ("secret.json", "KEYFILE"):
        (tmp_path / name).write_text("{}")
    made = {}
    for command in re.findall(r"^ +kubectl (create secret .+)$", text, re.MULTILINE):
        offline = ("--dry-run=client", "--output=yaml")
        (secret,) = kubectl(*command.split(), *offline, cwd=tmp_path)
        made[secret["metadata"]["name"]] = {*secret["data"]}
    assert made.keys() == {"tollgate", "tollgate-upstream-keys"}
    assert asked <= made["tollgate"] and "secret.json" in made["tollgate"]


def test_a_gateway_whose_spool_is_kept_is_a_stateful_set(tmp_path: Path) -> None:
    (patch,) = read(KEPT_SPOOL)["patches"]
    (deployment,) = of_kind("Deployment")
    assert patch["target"] == {"kind": "Deployment", "name": deployment["metadata"]["name"]}
    patched = deepcopy(deployment)
    for operation in yaml.safe_load(patch["patch"]):
        change(patched, operation)
    written = tmp_path / "gateway.yaml"
    written.write_text(yaml.safe_dump(patched))
    check_schemas(written)
    (claim,) = patched["spec"]["volumeClaimTemplates"]
    there = {each["name"] for each in pod(patched)["volumes"]} | {claim["metadata"]["name"]}
    assert {each["name"] for each in container(patched)["volumeMounts"]} == there
    assert patched["spec"]["serviceName"] in {
        each["metadata"]["name"] for each in of_kind("Service")
    }


def change(tree: Any, operation: dict[str, Any]) -> None:
    """Apply one operation of a JSON patch (RFC 6902) to what is there."""
    *parents, last = operation["path"].strip("/").split("/")
    for each in parents:
        tree = tree[int(each) if isinstance(tree, list) else each]
    key = int(last) if isinstance(tree, list) else last
    if operation["op"] == "test":
        assert tree[key] == operation["value"]
    elif operation["op"] == "remove":
        del tree[key]
    else:
        assert operation["op"] == "add" or key in tree
        tree[key] = operation["value"]


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (SERVICE_MONITOR, BASE / "service-monitor.yaml"),
        (KUSTOMIZATION, BASE / "kustomization.yaml"),
        (KUSTOMIZATION, KEPT_SPOOL),
    ],
    ids=lambda each: each.name if isinstance(each, Path) else "",
)
def test_what_others_read_matches_their_schema(schema: dict[str, object], path: Path) -> None:
    jsonschema_rs.validate(schema, read(path))


def test_every_manifest_is_a_resource_and_every_generated_file_is_there() -> None:
    files = {path.name for path in BASE.iterdir()}
    generated = [name for each in KUSTOMIZED["configMapGenerator"] for name in each["files"]]
    assert files == {*MANIFESTS, *generated, "kustomization.yaml"}
    names = [(each["kind"], each["metadata"]["name"]) for each in MANIFESTS.values()]
    assert len(set(names)) == len(names)


def test_configuration_and_secret_are_the_ones_that_are_there() -> None:
    (generated,) = KUSTOMIZED["configMapGenerator"]
    for workload in WORKLOADS:
        volumes = pod(workload).get("volumes", [])
        assert {each["name"] for each in values(volumes, "configMap")} <= {generated["name"]}
        claims = values(workload["spec"].get("volumeClaimTemplates", []), "metadata")
        there = {each["name"] for each in volumes} | {each["name"] for each in claims}
        assert {each["name"] for each in container(workload)["volumeMounts"]} == there
    wanted = [each for workload in WORKLOADS for each in values(workload, "secretKeyRef")]
    assert {each["name"] for each in wanted} == {"tollgate"}
    files = {each["secretName"] for each in values(list(MANIFESTS.values()), "secret")}
    assert files == {"tollgate", "tollgate-upstream-keys"}


def test_the_image_is_one_of_the_kustomization() -> None:
    named = {each["name"] for each in KUSTOMIZED["images"]}
    assert {container(each)["image"] for each in WORKLOADS} == named
    (tag,) = [each["newTag"] for each in KUSTOMIZED["images"]]
    assert f'version = "{tag}"' in (ROOT / "pyproject.toml").read_text()


def test_services_budgets_and_policies_select_pods_and_name_their_ports() -> None:
    for service in of_kind("Service"):
        behind = selected(service["spec"]["selector"])
        assert {each["targetPort"] for each in service["spec"]["ports"]} <= {*port_names(behind)}
    for budget in of_kind("PodDisruptionBudget"):
        assert selected(budget["spec"]["selector"]["matchLabels"])["spec"]["replicas"] > 1
    for policy in of_kind("NetworkPolicy"):
        of = selected(policy["spec"]["podSelector"]["matchLabels"])
        (rule,) = policy["spec"]["ingress"]
        assert {each["port"] for each in rule["ports"]} == {*port_names(of)}
        for source in rule["from"]:
            selected(source["podSelector"]["matchLabels"])
    for monitor in of_kind("ServiceMonitor"):
        labels = monitor["spec"]["selector"]["matchLabels"]
        (service,) = [
            each
            for each in of_kind("Service")
            if labels.items() <= each["metadata"]["labels"].items()
        ]
        ports = {each["name"] for each in service["spec"]["ports"]}
        assert {each["port"] for each in monitor["spec"]["endpoints"]} <= ports
    for workload in WORKLOADS:
        assert workload["spec"].get("selector", {}).get("matchLabels", {}).items() <= (
            labels_of(workload).items()
        )
        probed = [*values(pod(workload), "httpGet"), *values(pod(workload), "tcpSocket")]
        assert not probed or {each["port"] for each in probed} <= {*port_names(workload)}


def test_the_settings_are_good_and_name_the_engine_that_is_started() -> None:
    settings = read_settings()
    assert settings.secret_key_file == Path("/run/secrets/tollgate/secret.json")
    assert [model.starts_engine for model in settings.models] == [False]
    written = re.findall(r'^engine = "tcp:(.+)"$', (BASE / "tollgate.toml").read_text(), re.M)
    (engines,) = of_kind("StatefulSet")
    name, service = engines["metadata"]["name"], engines["spec"]["serviceName"]
    assert service in {each["metadata"]["name"] for each in of_kind("Service")}
    ports = port_names(engines).values()
    assert set(written) <= {f"{name}-0.{service}:{port}" for port in ports}
    arguments = container(engines)["args"]
    assert {f"--listen=tcp:0.0.0.0:{port}" for port in ports} <= set(arguments)
    assert f"--served-name={settings.models[0].name}" in arguments


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each["metadata"]["name"])
def test_its_command_is_one_that_the_image_knows(workload: dict[str, Any]) -> None:
    command, *arguments = container(workload)["args"]
    shown = subprocess.run(
        [BIN / "tollgate", command, "--help"], capture_output=True, text=True, timeout=60
    )
    assert shown.returncode == 0, shown.stderr
    options = [each.partition("=")[0] for each in arguments if each.startswith("--")]
    assert [each for each in options if each not in shown.stdout] == []


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each["metadata"]["name"])
def test_nobody_is_root_and_nothing_but_volumes_is_written(workload: dict[str, Any]) -> None:
    user = re.search(r"^USER (\d+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert user is not None
    context = pod(workload)["securityContext"]
    assert (context["runAsNonRoot"], context["runAsUser"]) == (True, int(user[1]))
    own = container(workload)["securityContext"]
    assert own["readOnlyRootFilesystem"] and not own["allowPrivilegeEscalation"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert container(workload)["resources"]["limits"]["memory"]


def test_a_gateway_that_leaves_has_time_to_drain() -> None:
    gateway = selected({"app.kubernetes.io/component": "gateway"})
    _, waited = container(gateway)["lifecycle"]["preStop"]["exec"]["command"]
    grace = pod(gateway)["terminationGracePeriodSeconds"]
    assert grace > int(waited) + read_settings().drain_timeout_s + 5
