"""The control plane in a Kubernetes cluster: its manifests fit together and fit the settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from vcasgd.settings import Settings

MANIFESTS = Path(__file__).parents[2] / "infra" / "kubernetes"


def documents() -> dict[str, dict[str, Any]]:
    """Return the documents by kind, each of which exists once."""
    names = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())["resources"]
    texts = [(MANIFESTS / name).read_text() for name in names]
    found = [each for text in texts for each in yaml.safe_load_all(text)]
    kinds = {each["kind"]: each for each in found}
    assert len(kinds) == len(found)
    return kinds


def test_control_plane_has_valid_settings() -> None:
    stack = documents()["StatefulSet"]["spec"]["template"]["spec"]
    (container,) = stack["containers"]
    values = {each["name"]: each["value"] for each in container["env"]}

    fields = {name.removeprefix("VCASGD_").lower(): value for name, value in values.items()}
    assert fields.keys() <= Settings.model_fields.keys()
    settings = Settings.model_validate(fields)
    assert settings.join_url == f"https://{documents()['Service']['metadata']['name']}:8790"
    (port,) = documents()["Service"]["spec"]["ports"]
    assert port["port"] == settings.join_port == container["ports"][0]["containerPort"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert str(settings.pools) == f"{mounts['pools']}/pools.yaml"


def test_controller_may_only_order_list_and_end_pods() -> None:
    kinds = documents()
    assert kinds["Role"]["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "list", "delete"]}
    ]
    assert kinds["RoleBinding"]["roleRef"]["name"] == kinds["Role"]["metadata"]["name"]
    account = kinds["ServiceAccount"]["metadata"]["name"]
    assert kinds["RoleBinding"]["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    assert kinds["StatefulSet"]["spec"]["template"]["spec"]["serviceAccountName"] == account
