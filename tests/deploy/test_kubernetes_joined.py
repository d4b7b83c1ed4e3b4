"""deploy/kubernetes/joined: a home and a pool of engines that join it, against the schemas of
Kubernetes, each other, the engine's command line and the settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from engine.__main__ import DRAIN_TIMEOUT_S, _arguments
from gateway.settings.load import load
from tests.deploy.manifests import (
    KUBECTL,
    KUSTOMIZATION,
    ROOT,
    check_schemas,
    container,
    kubectl,
    labels_of,
    pod,
    port_names,
    read,
    values,
)

FOLDER = ROOT / "deploy" / "kubernetes" / "joined"
KUSTOMIZED = read(FOLDER / "kustomization.yaml")
MANIFESTS = {name: read(FOLDER / name) for name in KUSTOMIZED["resources"]}
HOME, ENGINE = MANIFESTS["gateway.yaml"], MANIFESTS["engine.yaml"]
WORKLOADS = (HOME, ENGINE)


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [each for each in MANIFESTS.values() if each["kind"] == kind]


def selected(labels: dict[str, str]) -> dict[str, Any]:
    (found,) = [each for each in WORKLOADS if labels.items() <= labels_of(each).items()]
    return found


def service(name: str) -> dict[str, Any]:
    (found,) = [each for each in of_kind("Service") if each["metadata"]["name"] == name]
    return found


def mounted(workload: dict[str, Any]) -> list[Path]:
    return [Path(each["mountPath"]) for each in container(workload)["volumeMounts"]]


def test_the_manifests_match_their_schemas() -> None:
    check_schemas(*(FOLDER / name for name in MANIFESTS))
    jsonschema_rs.validate(KUSTOMIZATION, KUSTOMIZED)
    generated = [name for each in KUSTOMIZED["configMapGenerator"] for name in each["files"]]
    assert {each.name for each in FOLDER.iterdir()} == {
        *MANIFESTS,
        *generated,
        "kustomization.yaml",
    }


def test_the_documented_autoscaler_scales_the_pool(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
    written = re.search(r"```yaml\n(apiVersion: autoscaling.+?)```", text, re.DOTALL)
    assert written is not None
    (tmp_path / "scaling.yaml").write_text(written[1])
    check_schemas(tmp_path / "scaling.yaml")
    scaling = yaml.safe_load(written[1])["spec"]
    target = scaling["scaleTargetRef"]
    assert (target["kind"], target["name"]) == (ENGINE["kind"], ENGINE["metadata"]["name"])
    (model,) = load({"config": FOLDER / "tollgate.toml"}, {}).models
    assert scaling["maxReplicas"] <= len(model.joined)


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")
def test_kubectl_builds_what_matches_the_schemas(tmp_path: Path) -> None:
    built = kubectl("kustomize", "deploy/kubernetes/joined")
    names = {(each["kind"], each["metadata"]["name"]) for each in built}
    assert len(names) == len(built) == len(MANIFESTS) + 1
    for number, each in enumerate(built):
        (tmp_path / f"{number}.yaml").write_text(yaml.safe_dump(each))
    check_schemas(*sorted(tmp_path.iterdir()))


def test_engines_dial_the_port_where_the_home_listens_and_nothing_else_reaches_it() -> None:
    settings = load({"config": FOLDER / "tollgate.toml"}, {})
    assert settings.fleet.join_listen == f"tcp:0.0.0.0:{port_names(HOME)['join']}"
    arguments = _arguments(container(ENGINE)["args"][1:])
    name, _, port = arguments.join.partition(":")
    joins = service(name)["spec"]
    assert [(each["port"], each["targetPort"]) for each in joins["ports"]] == [(int(port), "join")]
    assert selected(joins["selector"]) is HOME and joins["publishNotReadyAddresses"]
    home, engine = (
        next(each for each in of_kind("NetworkPolicy") if each["metadata"]["name"] == name)["spec"]
        for name in ("tollgate-home", "tollgate-engine")
    )
    assert selected(home["podSelector"]["matchLabels"]) is HOME
    (by_engines,) = [each for each in home["ingress"] if {"port": "join"} in each["ports"]]
    assert [selected(each["podSelector"]["matchLabels"]) for each in by_engines["from"]] == [ENGINE]
    assert selected(engine["podSelector"]["matchLabels"]) is ENGINE and engine["ingress"] == []
    assert not container(ENGINE).get("ports")


def test_the_pool_is_of_a_model_that_has_places_for_it() -> None:
    (model,) = load({"config": FOLDER / "tollgate.toml"}, {}).models
    arguments = _arguments(container(ENGINE)["args"][1:])
    assert arguments.served_name == model.name and not model.started
    assert "replicas" not in ENGINE["spec"], "the planner's decision stays when this is applied"


def test_an_engine_keeps_its_certificate_and_gets_its_token_from_a_secret() -> None:
    arguments = _arguments(container(ENGINE)["args"][1:])
    (claim,) = ENGINE["spec"]["volumeClaimTemplates"]
    places = {each["name"]: Path(each["mountPath"]) for each in container(ENGINE)["volumeMounts"]}
    assert arguments.identity.is_relative_to(places[claim["metadata"]["name"]])
    (token,) = [each for each in pod(ENGINE)["volumes"] if "secret" in each]
    assert arguments.token.parent == places[token["name"]]
    assert not [*values(ENGINE, "secretKeyRef")], "no token in a variable"
    probed = [each["command"][-1] for each in values(pod(ENGINE), "exec")]
    assert set(probed) == {str(arguments.joined_file)}
    assert arguments.joined_file.parent in mounted(ENGINE)


def test_what_leaves_has_time_to_drain_and_one_leaves_at_a_time() -> None:
    assert pod(ENGINE)["terminationGracePeriodSeconds"] > DRAIN_TIMEOUT_S + 5
    settings = load({"config": FOLDER / "tollgate.toml"}, {})
    _, waited = container(HOME)["lifecycle"]["preStop"]["exec"]["command"]
    grace = pod(HOME)["terminationGracePeriodSeconds"]
    assert grace > int(waited) + settings.drain_timeout_s + 5
    (budget,) = of_kind("PodDisruptionBudget")
    assert selected(budget["spec"]["selector"]["matchLabels"]) is ENGINE
    assert budget["spec"]["maxUnavailable"] == 1


def test_the_home_may_scale_the_pool_and_nothing_else() -> None:
    (model,) = load({"config": FOLDER / "tollgate.toml"}, {}).models
    assert model.kubernetes is not None and model.kubernetes.namespace is None
    assert model.kubernetes.stateful_set == ENGINE["metadata"]["name"]
    (role,), (binding,), (account,) = map(of_kind, ("Role", "RoleBinding", "ServiceAccount"))
    assert role["rules"] == [
        {
            "apiGroups": ["apps"],
            "resources": ["statefulsets/scale"],
            "resourceNames": [ENGINE["metadata"]["name"]],
            "verbs": ["get", "patch"],
        }
    ]
    assert binding["roleRef"] == {
        "apiGroup": role["apiVersion"].partition("/")[0],
        "kind": "Role",
        "name": role["metadata"]["name"],
    }
    name = account["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": name}]
    assert account["automountServiceAccountToken"] is False
    assert (pod(HOME)["serviceAccountName"], "serviceAccountName" in pod(ENGINE)) == (name, False)
    assert [pod(each)["automountServiceAccountToken"] for each in WORKLOADS] == [True, False]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each["metadata"]["name"])
def test_a_pod_has_no_right_that_it_does_not_need(workload: dict[str, Any]) -> None:
    assert pod(workload)["securityContext"]["runAsNonRoot"]
    own = container(workload)["securityContext"]
    assert own["readOnlyRootFilesystem"] and not own["allowPrivilegeEscalation"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    claims = [each["metadata"]["name"] for each in workload["spec"]["volumeClaimTemplates"]]
    there = {each["name"] for each in pod(workload)["volumes"]} | {*claims}
    assert {each["name"] for each in container(workload)["volumeMounts"]} == there
    assert workload["spec"]["serviceName"] in {
        each["metadata"]["name"] for each in of_kind("Service")
    }
    assert selected(workload["spec"]["selector"]["matchLabels"]) is workload
    probed = {each["port"] for each in values(pod(workload), "httpGet")}
    assert not probed or probed <= {*port_names(workload)}
    assert container(workload)["image"] == KUSTOMIZED["images"][0]["name"]
    assert KUSTOMIZED["images"] == read(FOLDER.parent / "base" / "kustomization.yaml")["images"]
