"""The manifests of deploy/kubernetes."""

from __future__ import annotations

from typing import Any

import yaml

from tests.support.product.snippets import ROOT


def documents(name: str) -> dict[str, Any]:
    """The documents of a manifest by their kind."""
    text = (ROOT / "deploy" / "kubernetes" / name).read_text(encoding="utf-8")
    return {one["kind"]: one for one in yaml.safe_load_all(text)}
