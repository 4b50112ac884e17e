"""Checks that matter are each held by a test: without the check, that test fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Mutation(NamedTuple):
    """A text in a file of the package, what it becomes, and the test that fails then."""

    file: str
    text: str
    instead: str
    test: str


MUTATIONS = {
    "fencing": Mutation(
        "store/scripts/fence.lua",
        "if tonumber(held) ~= tonumber(token) then",
        "if false then",
        "tests/store/test_snapshots.py::TestFencing::test_an_old_token_commits_nothing",
    ),
    "position": Mutation(
        "store/scripts/tensors/push.lua",
        "if position ~= tonumber(ARGV[3]) then",
        "if false then",
        "tests/store/test_updates.py::TestPush::test_out_of_place_it_is_refused_with_its_payload",
    ),
    "expiry": Mutation(
        "store/scripts/ledger/acquire.lua",
        "if not piece or ends > now then break end",
        "if true then break end",
        "tests/store/test_leases.py::TestExpiry::test_a_lease_that_is_not_renewed_expires",
    ),
    "budget": Mutation(
        "controller/fleet/demands.py",
        "reasons.append(pause_reason(budget, spent, committed))",
        "pass",
        "tests/controller/test_demands.py::TestBudget"
        "::test_job_is_paused_before_its_machines_cost_more",
    ),
    "checksum": Mutation(
        "store/tensors/updates.py",
        "if digest.intdigest() != header.checksum:",
        "if False:",
        "tests/store/test_updates.py::TestPayload::test_damage_is_found",
    ),
    "path": Mutation(
        "task/package.py",
        'if name.startswith("/") or ".." in Path(name).parts or "\\\\" in name:',
        "if False:",
        "tests/unit/test_package.py::TestUnpack::test_name_that_leads_outside_is_refused",
    ),
    "scope": Mutation(
        "api/access.py",
        "if caller.scope.includes(needed):",
        "if True:",
        "tests/api/test_api_tokens.py"
        "::test_each_route_refuses_lower_scopes_and_names_the_one_it_needs",
    ),
    "back-off": Mutation(
        "fleet/plan/purchases.py",
        "return pool.market(zone, spot).blocked_until <= self._now",
        "return True",
        "tests/fleet/test_plan_markets.py::test_decide",
    ),
    "rollback": Mutation(
        "parameter_server/blend.py",
        "if header.rollbacks < self.meta.rollbacks:",
        "if False:",
        "tests/parameter_server/test_shard_rollback.py"
        "::test_updates_of_the_model_that_diverged_are_refused_and_blame_no_worker",
    ),
    "fairness": Mutation(
        "fleet/plan/shares.py",
        "heapreplace(queue, ((number + 2) / job.weight, position,",
        "heapreplace(queue, (0.0, position,",
        "tests/fleet/test_plan_shares.py::test_machines_are_shared",
    ),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the package and its tests, and link everything else."""
    folder = tmp_path_factory.mktemp("mutated")
    for path in ROOT.iterdir():
        if path.name in ("vcasgd", "tests"):
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.name not in (".git", ".venv", "build"):
            (folder / path.name).symlink_to(path)
    return folder


def run(copy: Path, test: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_check_is_where_it_was(name: str) -> None:
    mutation = MUTATIONS[name]

    assert (ROOT / "vcasgd" / mutation.file).read_text().count(mutation.text) == 1
    file, *names = mutation.test.split("::")
    assert all(each in (ROOT / file).read_text() for each in names)


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_missing_check_is_found_by_its_test(copy: Path, name: str) -> None:
    mutation = MUTATIONS[name]
    file = copy / "vcasgd" / mutation.file
    source = file.read_text()
    assert (whole := run(copy, mutation.test)).returncode == 0, whole.stdout

    file.write_text(source.replace(mutation.text, mutation.instead))
    without = run(copy, mutation.test)
    file.write_text(source)

    assert without.returncode == 1, without.stdout
    assert " failed" in without.stdout
