"""Manifests and images name flags and versions that exist, and times that fit each other."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

import rooflax
from rooflax.cli.main import parser_of
from rooflax.cli.platform import LEADER_PORT
from rooflax.fields.declaration import variable_of
from tests.support.product.manifests import documents
from tests.support.product.snippets import ROOT

DEPLOY = ROOT / "deploy"
LABEL = {"app.kubernetes.io/name": "rooflax"}


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    return documents("rooflax.yaml")["Deployment"]["spec"]["template"]["spec"]


def test_flags_and_variables_are_the_servers(pod):
    parser = parser_of("serve")
    variables = {variable_of(action.option_strings) for action in parser._actions}
    (server,) = pod["containers"]
    parser.parse_args(server["args"])
    assert {one["name"] for one in server["env"]} <= variables
    compose = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text(encoding="utf-8"))
    service = compose["services"]["rooflax"]
    parser.parse_args(service["command"])
    image = (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8")
    named = {*service["environment"], *re.findall(r"\b(ROOFLAX_\w+)=", image)}
    assert named <= variables | {"ROOFLAX_CACHE_DIR"}


def test_pods_of_several_hosts_run_one_command_and_the_first_has_the_probes(pod):
    of = documents("several-hosts.yaml")
    template = of["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    leader, worker = (template[f"{role}Template"]["spec"] for role in ("leader", "worker"))
    (first,), (other,) = leader["containers"], worker["containers"]
    args = parser_of("serve").parse_args(first["args"])
    assert other["args"] == first["args"] and args.mesh == "tensor=16"
    gpus = int(first["resources"]["limits"]["nvidia.com/gpu"])
    assert template["size"] * gpus == 16 and other["resources"] == first["resources"]
    assert {port["containerPort"] for port in first["ports"]} == {args.port, LEADER_PORT}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert first[name] == pod["containers"][0][name] and name not in other
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    for each in (leader, worker):
        assert each["terminationGracePeriodSeconds"] >= args.drain_s + 10
    selector = of["Service"]["spec"]["selector"]
    assert selector == template["leaderTemplate"]["metadata"]["labels"]


def test_a_pod_ends_after_its_drain(pod):
    (server,) = pod["containers"]
    drain = parser_of("serve").parse_args(server["args"]).drain_s
    asleep = server["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= drain + asleep + 10


def test_every_label_is_the_pods(pod):
    labels = documents("rooflax.yaml")["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert labels == LABEL
    for name in ("rooflax.yaml", "monitoring.yaml", "inference-pool.yaml"):
        for kind, one in documents(name).items():
            selector = one["spec"].get("selector")
            if selector is not None:
                assert selector in (LABEL, {"matchLabels": LABEL}), kind
    assert (
        documents("rooflax.yaml")["Deployment"]["spec"]["template"]["metadata"]["labels"] == LABEL
    )


def test_the_pool_is_shaped_as_the_published_resource():
    """The fields of inference.networking.k8s.io/v1 as its reference page has them."""
    pool = documents("inference-pool.yaml")["InferencePool"]
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    assert set(pool["spec"]) == {"selector", "targetPorts", "endpointPickerRef"}
    assert pool["spec"]["targetPorts"] == [{"number": 8000}]
    picker = pool["spec"]["endpointPickerRef"]
    assert set(picker) <= {"group", "kind", "name", "port", "failureMode"}
    assert picker["failureMode"] in ("FailOpen", "FailClose")


def test_alerts_say_when_and_what():
    (group,) = documents("monitoring.yaml")["PrometheusRule"]["spec"]["groups"]
    for rule in group["rules"]:
        assert {"alert", "expr", "labels", "annotations"} <= set(rule), rule
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["expr"].count("(") == rule["expr"].count(")")


@pytest.mark.parametrize(
    "path", ["docker/Dockerfile", "docker/compose.yaml", "kubernetes/rooflax.yaml"]
)
def test_images_have_this_version(path: str):
    text = (DEPLOY / path).read_text(encoding="utf-8")
    assert set(re.findall(r"rooflax:(\d[\w.]*)", text)) == {rooflax.__version__}


def test_the_site_has_every_page():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = [
        page if isinstance(page, str) else next(iter(page.values()))
        for part in site["nav"]
        for pages in part.values()
        for page in pages
    ]
    docs = ROOT / "docs"
    pages = {str(path.relative_to(docs)) for path in docs.rglob("*.md")} | {"index.md"}
    assert sorted(named) == sorted(pages), "say in mkdocs.yml where the page stands"
