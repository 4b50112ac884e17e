"""Machines that are pods: a node is drained, and no sample is lost or repeated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.counted_job import CountedJob, training_machines
from support.joinable_stack import launching_stack
from support.kubernetes import NAMESPACE, FakeKubernetes, Kubelet
from support.waiting import await_truth

from vcasgd.client import Client

pytestmark = pytest.mark.slow


POOL = "gpu"
MACHINES = 2


@dataclass
class KubernetesStack:
    """A stack whose only pool is a namespace of Kubernetes."""

    client: Client
    api: FakeKubernetes
    kubelet: Kubelet
    token: str

    def trains_on(self, count: int) -> bool:
        """Return True if so many machines run and have a worker."""
        return training_machines(self.client) == count

    def drain_one(self) -> None:
        """Drain the node of a machine, and wait until another one has replaced it."""
        await_truth(lambda: self.trains_on(MACHINES) and len(self.api.machines()) == MACHINES)
        victim = self.api.machines()[0]
        self.api.delete(victim)
        await_truth(lambda: victim not in self.api.pods())
        said = self.kubelet.log_of(victim)
        assert "leaves: interrupted" in said, "it got a notice"
        assert "left in good order" in said
        await_truth(lambda: self.trains_on(MACHINES))
        assert victim not in self.api.machines()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesStack]:
    folder = tmp_path_factory.mktemp("kubernetes")
    with FakeKubernetes(folder) as api, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(api.kubeconfig))
        values = dict[tuple[str, str], str]()
        kubelet = Kubelet(api, folder, values)
        with launching_stack(folder, _pool(folder)) as (_, client, token):
            values["join", "token"] = token
            yield KubernetesStack(client, api, kubelet, token)
        left = [name for name, pod in api.pods().items()
                if pod["status"]["phase"] in ("Pending", "Running")
                and "deletionTimestamp" not in pod["metadata"]]  # fmt: skip
        assert left == [], "`down` left a pod behind"
        kubelet.end()


def _pool(folder: Path) -> dict[str, Any]:
    template = {"image": "vcasgd:test", "token_secret": "join", "namespace": NAMESPACE}
    return {
        "name": POOL,
        "provider": "kubernetes",
        "max_machines": MACHINES,
        "template": {**template, "container": {"env": [{"name": "VCASGD_HOME",
                                                        "value": str(folder)}]}},
    }  # fmt: skip


@pytest.mark.ci
def test_drained_machine_is_replaced_and_no_sample_is_lost(
    stack: KubernetesStack, tmp_path: Path
) -> None:
    # Given a job on two machines
    job = CountedJob(stack.client, tmp_path)
    job.await_updates(3)

    # When the node of one of them is drained
    stack.drain_one()

    # Then another one replaces it, and every sample was applied exactly once
    assert stack.token not in str(stack.api.pods()), "it is in the secret only"
    job.finish()

    # And machines without a job end
    await_truth(lambda: not stack.api.machines() and not stack.api.machines("Pending"))
