"""Names and texts of terraform/, by the rules of the clouds."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cloud_rules import Rule, violations
from support.terraform_harness import Terraform

#: The longest names that the variables allow, and all options that make resources.
RUN = """
run "self_hosted" {{
  command = plan
  variables {{
    {shared}
    store         = {{ nodes = 2, replicas = 1 }}
    gateway = {{
      cidrs = ["0.0.0.0/0"]
      host  = "join.example.org"
      acme  = {{ email = "a@b.org" }}
    }}
    ledger_backup = {{ days = 7 }}
    tls           = true
    api_cidrs     = ["203.0.113.7/32"]
    data_buckets  = ["some-data"]
  }}
}}

run "managed" {{
  command = plan
  variables {{
    {shared}
    redis   = "managed"
    private = true
  }}
}}
"""
FILES = {"aws": "variables.tftest.hcl", "gcp": "cluster.tftest.hcl"}
LONGEST = {
    "aws": ('cluster = "c23456789-b23456789-a234"', "p" * 40, "c6i.large"),
    "gcp": (
        'cluster = "c23456789-b23456789-a2"\n    project = "p23456789-b23456789-a23456789"',
        "p" * 14,
        "e2-standard-2",
    ),
}


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("root", ["aws", "gcp"])
def test_clouds_accept_all_names_and_texts(root: str, tmp_path: Path) -> None:
    # Given plans with the longest names
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for change in _planned(root, tmp_path):
        found[change["type"]].append(change["change"]["after"] or {})
    assert len(found) > 15
    # Then nothing in them breaks a rule of its cloud
    broken = [
        text for kind, rows in found.items() for values in rows for text in violations(kind, values)
    ]
    assert broken == []


def _planned(root: str, folder: Path) -> Iterator[dict[str, Any]]:
    terraform = Terraform.with_provider(folder / "copy", root)
    file = terraform.folder / "tests" / FILES[root]
    mocks = file.read_text().partition('\nrun "')[0]
    names, pool, kind = LONGEST[root]
    shared = f'{names}\n    pools = {{ {pool} = {{ machine_types = ["{kind}"] }} }}'
    file.write_text(mocks + RUN.format(shared=shared))
    terraform.init()
    # Its schemas alone are tens of megabytes
    said = terraform("test", "-json", "-verbose")
    for line in said.splitlines():
        event = json.loads(line)
        yield from event.get("test_plan", {}).get("resource_changes", [])


@pytest.mark.parametrize("text", ["the gateway's authority", "<a>", "x" * 256])
def test_a_text_that_a_cloud_refuses_is_found(text: str) -> None:
    assert list(violations("aws_security_group", {"name": "a", "description": text}))
    assert list(violations("aws_security_group", {"name": "sg-a", "description": "ok"}))
    assert Rule(r"[a-z]+", 3).allows("abc")


def test_an_attribute_without_a_rule_is_found() -> None:
    assert list(violations("aws_something_new", {"description": "text"}))
