"""Checks what deploy/ and .github/ hold against published schemas, offline but for the packages.

    python tools/manifests.py NODE_MODULES

Kubernetes' own kinds: kubernetes-validate. Compose and GitHub's workflows: check-jsonschema's
copies. Resources of others: the packages @kubernetes-models/* of npm, which are made from their
definitions. InferencePool and LeaderWorkerSet have none; tests/unit/product/test_deploy.py checks
their shape.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parents[1]
KUBERNETES = "1.34"
OTHERS = {
    "PodMonitor": "prometheus-operator/_schemas/ComGithubPrometheusOperatorPrometheusOperator"
    "PkgApisMonitoringV1PodMonitor.js",
    "PrometheusRule": "prometheus-operator/_schemas/ComGithubPrometheusOperatorPrometheusOperator"
    "PkgApisMonitoringV1PrometheusRule.js",
    "ScaledObject": "keda/_schemas/ComGithubKedacoreKedaV2ApisKedaV1alpha1ScaledObject.js",
    "HTTPRoute": "gateway-api/_schemas/IoK8sSigsGatewayApiApisV1HTTPRoute.js",
}
SCRIPT = """
const {validate} = await import(process.argv[1]);
const {readFileSync} = await import('fs');
if (!validate(JSON.parse(readFileSync(0)))) {
  console.error(JSON.stringify(validate.errors)); process.exit(1);
}
"""


def main() -> None:
    modules = Path(sys.argv[1]).resolve() / "@kubernetes-models"
    said = []
    for path in sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml")):
        for one in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            kind, how = one["kind"], f"Kubernetes {KUBERNETES}"
            if kind in ("InferencePool", "LeaderWorkerSet"):
                how = "not checked here"
            elif kind in OTHERS:
                schema = modules / OTHERS[kind]
                package = json.loads(
                    (modules / OTHERS[kind].split("/")[0] / "package.json").read_text()
                )
                how = f"{package['name']} {package['version']}"
                command = ["node", "--input-type=module", "-e", SCRIPT, str(schema)]
                subprocess.run(command, input=json.dumps(one).encode(), check=True)
            else:
                kubernetes_validate.validate(one, KUBERNETES, strict=True)
            said.append(f"{path.name}: {kind}: {how}")
    for schema, paths in (
        ("vendor.compose-spec", [ROOT / "deploy" / "docker" / "compose.yaml"]),
        ("vendor.github-workflows", sorted((ROOT / ".github" / "workflows").glob("*.yml"))),
    ):
        command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema]
        subprocess.run([*command, *map(str, paths)], check=True)
        said.append(f"{', '.join(path.name for path in paths)}: {schema}")
    sys.stdout.write("\n".join(said) + "\n")


if __name__ == "__main__":
    main()
