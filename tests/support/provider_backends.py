"""One emulated backend for each provider, with one interface, for the tests of the contract."""

from __future__ import annotations

import email
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from botocore.handlers import BUILTIN_HANDLERS

from support.cloud_rules import check_aws_request
from support.emulated_ec2 import ENVIRONMENT, EmulatedEc2, emulated_ec2
from support.fake_compute import ComputeServer, FakeCompute
from support.kubernetes import NAMESPACE, FakeKubernetes, Kubelet
from support.processes import run_program
from support.slurm import SlurmCluster, slurm_cluster
from support.waiting import await_truth
from vcasgd.fleet.pools import (
    AwsPoolSpec,
    ExecPoolSpec,
    GcpPoolSpec,
    KubernetesPoolSpec,
    LocalPoolSpec,
    LocalTemplate,
    SlurmPoolSpec,
    parse_pools,
)
from vcasgd.fleet.prices import PriceTable
from vcasgd.fleet.providers.aws import AwsProvider
from vcasgd.fleet.providers.base import Boot, Provider
from vcasgd.fleet.providers.commands import ExecProvider
from vcasgd.fleet.providers.joining import JoinedFleet
from vcasgd.fleet.providers.kubernetes import CLUSTER_LABEL, POOL_LABEL, KubernetesProvider
from vcasgd.fleet.providers.local.provider import LocalProvider
from vcasgd.fleet.providers.slurm import SlurmProvider

if TYPE_CHECKING:
    from vcasgd.fleet.providers.gcp import GcpProvider

#: Checks each request to EC2 by the cloud's rules, which the emulator doesn't.
RULES = ("before-parameter-build.ec2", check_aws_request)
AWS_ZONES = ("us-east-1a", "us-east-1b")
GCP_ZONES = ("us-central1-a", "us-central1-b")
#: Examples of commands of pools.
CLOUDS = Path(__file__).parents[2] / "examples" / "clouds"
CLOUD_CONFIG = "#cloud-config\nruncmd: [[/usr/local/lib/vcasgd/boot]]\n"


class ProviderBackend:
    """A place to buy machines, whose faults a test controls."""

    pool: str
    zones: tuple[str, str]
    kind: str
    #: Parts of the contract that don't apply, each with the reason.
    lacks: Mapping[str, str] = {}

    def provider(self, cluster: str = "test") -> Provider:
        raise NotImplementedError

    def exhaust(self, *zones: str) -> None:
        """Remove all capacity from the zones."""
        raise NotImplementedError

    def limit_launches(self, machines: int) -> None:
        """Limit the number of machines that one launch gets."""
        raise NotImplementedError

    def tags(self, machine_id: str) -> Mapping[str, str]:
        raise NotImplementedError

    def report_boot_error(self, machine_id: str, text: str) -> None:
        """Report a boot error as the machine, as the image's scripts do."""
        raise NotImplementedError

    def alive(self) -> set[str]:
        """Return all machines that would be charged, of any cluster."""
        raise NotImplementedError


class LocalBackend(ProviderBackend):
    pool, zones, kind = "local", ("local-a", "local-b"), "process"
    lacks: Mapping[str, str] = {
        "zones": "zones of the local pool are names only; none runs out alone",
        "pages": "a folder has no pages",
        "boot reports": "a process of this computer reports in its log",
    }

    def __init__(self, home: Path) -> None:
        self._home = home
        self._providers: list[LocalProvider] = []

    def provider(self, cluster: str = "test") -> LocalProvider:
        template = LocalTemplate(
            price_per_hour=0.1, on_demand_price_per_hour=0.4, notice_seconds=30.0
        )
        fields = {"name": self.pool, "provider": "local", "max_machines": 20, "zones": self.zones}
        pool = LocalPoolSpec(**fields, template=template)
        self._providers.append(LocalProvider(self._home, cluster, pool, owner_grace_seconds=None))
        return self._providers[-1]

    def exhaust(self, *zones: str) -> None:
        if set(zones) == set(self.zones):
            self.limit_launches(0)

    def limit_launches(self, machines: int) -> None:
        self.provider().override(capacity=machines)

    def tags(self, machine_id: str) -> Mapping[str, str]:
        one = next(one for one in self.provider().machines() if one.id == machine_id)
        return {"cluster": "test", "pool": one.pool}

    def alive(self) -> set[str]:
        return {one.id for provider in self._providers for one in provider.machines()}

    def close(self) -> None:
        for provider in self._providers:
            provider.destroy_all()


class AwsBackend(ProviderBackend):
    pool, zones, kind = "aws-spot", AWS_ZONES, "c5.xlarge"

    def __init__(self, ec2: EmulatedEc2) -> None:
        if RULES not in BUILTIN_HANDLERS:
            BUILTIN_HANDLERS.append(RULES)
        self.ec2 = ec2
        self._subnets = ec2.subnets()
        self._template = ec2.template(CLOUD_CONFIG)
        ec2.prices = {(self.kind, zone): 0.05 for zone in self.zones}

    def document(self, **more: Any) -> dict[str, Any]:
        """A pool as it is in the file."""
        template = {
            "launch_template": self._template,
            "subnets": {zone: self._subnets[zone] for zone in self.zones},
        }
        return {
            "name": self.pool,
            "provider": "aws",
            "region": "us-east-1",
            "zones": list(self.zones),
            "machine_types": [self.kind, "m5.large"],
            "template": template,
            **more,
        }

    def moved(self, **more: Any) -> dict[str, Any]:
        """The pool in another region, where it has no machines."""
        template = {"launch_template": self._template}
        return self.document(
            region="eu-central-1", zones=["eu-central-1a"], template=template, **more
        )

    def spec(self, **more: Any) -> AwsPoolSpec:
        (spec,) = parse_pools({"pools": [self.document(**more)]})
        assert isinstance(spec, AwsPoolSpec)
        return spec

    def provider(self, cluster: str = "test", **more: Any) -> AwsProvider:
        return AwsProvider(
            cluster, [self.spec(**more)], PriceTable.load("aws"), price_seconds=0.0, page=5
        )

    def exhaust(self, *zones: str) -> None:
        self.ec2.exhausted = {self._subnets[zone]: "InsufficientInstanceCapacity" for zone in zones}

    def limit_launches(self, machines: int) -> None:
        self.ec2.room = machines

    def tags(self, machine_id: str) -> Mapping[str, str]:
        row = next(row for row in self.ec2.alive() if row["InstanceId"] == machine_id)
        tags = {tag["Key"]: tag["Value"] for tag in row["Tags"]}
        return {"cluster": tags["vcasgd:cluster"], "pool": tags["vcasgd:pool"]}

    def user_data(self, machine_id: str) -> str:
        return self.ec2.user_data(machine_id)

    def report_boot_error(self, machine_id: str, text: str) -> None:
        tags = [{"Key": "vcasgd:boot-error", "Value": text}]
        self.ec2.ec2().create_tags(Resources=[machine_id], Tags=tags)

    def alive(self) -> set[str]:
        return {row["InstanceId"] for row in self.ec2.alive()}


class GcpBackend(ProviderBackend):
    pool, zones, kind = "gcp-spot", GCP_ZONES, "n2-standard-4"

    def __init__(self, compute: FakeCompute, url: str) -> None:
        self.compute = compute
        self.url = url
        compute.templates["global/instanceTemplates/workers"] = {
            "machineType": "e2-standard-2",
            "labels": {"team": "science"},
            "metadata": {"items": [{"key": "user-data", "value": CLOUD_CONFIG}]},
            "networkInterfaces": [{"network": "default"}],
        }

    def document(self, **more: Any) -> dict[str, Any]:
        """A pool as it is in the file."""
        return {
            "name": self.pool,
            "provider": "gcp",
            "region": "us-central1",
            "zones": list(self.zones),
            "machine_types": [self.kind, "e2-standard-2"],
            "template": {"project": "project", "instance_template": "workers"},
            **more,
        }

    def spec(self, **more: Any) -> GcpPoolSpec:
        (spec,) = parse_pools({"pools": [self.document(**more)]})
        assert isinstance(spec, GcpPoolSpec)
        return spec

    def provider(self, cluster: str = "test", **more: Any) -> GcpProvider:
        # Google's library takes seconds to import, in each process that collects tests.
        from vcasgd.fleet.providers.gcp import GcpProvider

        return GcpProvider(
            cluster, [self.spec(**more)], PriceTable.load("gcp"), url=self.url, page=5
        )

    def exhaust(self, *zones: str) -> None:
        self.compute.exhausted = dict.fromkeys(zones, "ZONE_RESOURCE_POOL_EXHAUSTED")

    def limit_launches(self, machines: int) -> None:
        self.compute.room = dict.fromkeys(self.zones, machines)

    def tags(self, machine_id: str) -> Mapping[str, str]:
        row = next(row for row in self.compute.alive() if row["name"] == machine_id)
        return {"cluster": row["labels"]["vcasgd-cluster"], "pool": row["labels"]["vcasgd-pool"]}

    def user_data(self, machine_id: str) -> str:
        row = next(row for row in self.compute.alive() if row["name"] == machine_id)
        items = {item["key"]: item["value"] for item in row["metadata"]["items"]}
        return str(items["user-data"])

    def report_boot_error(self, machine_id: str, text: str) -> None:
        self.compute.attributes[machine_id, "vcasgd/boot-error"] = text

    def alive(self) -> set[str]:
        return {row["name"] for row in self.compute.alive()}

    def remove(self, machine_id: str) -> None:
        self.compute.remove(machine_id)


#: Parts of the contract that no cluster of one's own has.
_OWN_CLUSTER = {
    "prices": "the pools file has one price",
    "both kinds": "the nodes of a pool are all preemptible, or none is",
    "boot reports": "the cluster itself says why a machine doesn't start",
}


class SlurmBackend(ProviderBackend):
    """A real Slurm cluster with two partitions and two cores."""

    pool, zones, kind = "hpc", ("spot", "urgent"), "node"
    lacks: Mapping[str, str] = {
        **_OWN_CLUSTER,
        "partial launches": "Slurm accepts an array as a whole, and starts its jobs as it has room",
    }

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self._cluster = cluster
        self._token = folder / "token"
        self._token.write_text("a-token")

    def provider(self, cluster: str = "test") -> SlurmProvider:
        template = {"token_file": str(self._token), "price_per_hour": 0.05}
        spec = SlurmPoolSpec.model_validate(
            {"name": self.pool, "provider": "slurm", "zones": self.zones, "template": template}
        )
        return SlurmProvider(cluster, [spec], JoinedFleet())

    def exhaust(self, *zones: str) -> None:
        for zone in zones:
            self._cluster.run("scontrol", "update", f"PartitionName={zone}", "State=INACTIVE")

    def tags(self, machine_id: str) -> Mapping[str, str]:
        array, _, index = machine_id.removeprefix(f"join-{self.pool}-").partition("-")
        (job,) = (each for each in self._cluster.jobs() if each.id == f"{array}_{index}")
        _, cluster, pool, _ = job.name.split("/")
        return {"cluster": cluster, "pool": pool}

    def alive(self) -> set[str]:
        return {each.id for each in self._cluster.jobs()}


class KubernetesBackend(ProviderBackend):
    """An API server, and a node that runs processes."""

    pool, zones, kind = "pods", ("zone-a", "zone-b"), "standard-4"
    lacks: Mapping[str, str] = {
        **_OWN_CLUSTER,
        "capacity": "Kubernetes accepts pods without room, which then wait",
        "zones": "Kubernetes accepts pods without room, which then wait",
        "memory": "Kubernetes forgets pods that were deleted",
    }

    def __init__(self, api: FakeKubernetes) -> None:
        self._api = api

    def provider(self, cluster: str = "test") -> KubernetesProvider:
        template = {"image": "vcasgd:1", "token_secret": "join", "namespace": NAMESPACE,
                    "grace_seconds": 30, "price_per_hour": 0.05}  # fmt: skip
        spec = KubernetesPoolSpec.model_validate(
            {"name": self.pool, "provider": "kubernetes", "zones": self.zones,
             "machine_types": [self.kind], "template": template}
        )  # fmt: skip
        return KubernetesProvider(cluster, [spec], JoinedFleet())

    def limit_launches(self, machines: int) -> None:
        self._api.limit_pods(machines)

    def tags(self, machine_id: str) -> Mapping[str, str]:
        labels = self._api.pods()[machine_id]["metadata"]["labels"]
        return {"cluster": labels[CLUSTER_LABEL], "pool": labels[POOL_LABEL]}

    def alive(self) -> set[str]:
        return {*self._api.pods()}


class ExecBackend(ProviderBackend):
    """Commands of a user, whose machines are processes."""

    pool, zones, kind = "any", ("zone-a", "zone-b"), "machine"
    lacks: Mapping[str, str] = {
        **{name: why for name, why in _OWN_CLUSTER.items() if name != "prices"},
        "zones": "the commands choose among the zones",
    }

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch = folder, patch
        patch.setenv("CLOUD_FOLDER", str(folder))
        (folder / "token").write_text("a-token")

    def provider(self, cluster: str = "test") -> ExecProvider:
        (spec,) = parse_pools({"pools": [exec_pool(self.pool, self._folder, zones=self.zones)]})
        assert isinstance(spec, ExecPoolSpec)
        return ExecProvider(cluster, [spec], JoinedFleet())

    def exhaust(self, *zones: str) -> None:
        assert {*zones} == {*self.zones}
        self.limit_launches(0)

    def limit_launches(self, machines: int) -> None:
        self._patch.setenv("CLOUD_LIMIT", str(machines))

    def tags(self, machine_id: str) -> Mapping[str, str]:
        own = {one.id: one.pool for one in self.provider().machines()}
        return {"cluster": "test", "pool": own[machine_id]}

    def alive(self) -> set[str]:
        rows = exec_machines()
        return {row["name"] for row in rows if row["state"] != "gone"}

    def close(self) -> None:
        request = json.dumps({"machines": [{"name": name} for name in self.alive()]})
        subprocess.run(
            exec_commands()["terminate"], input=request, stdout=subprocess.DEVNULL, text=True,
            check=True,
        )  # fmt: skip


def exec_commands(script: Path = CLOUDS / "processes.py") -> dict[str, list[str]]:
    """Return the commands of a pool whose machines a script manages."""
    return {name: [sys.executable, str(script), name] for name in ("list", "launch", "terminate")}


def exec_machines() -> list[dict[str, Any]]:
    """Return what the example's script lists, also machines that are gone."""
    done = run_program(exec_commands()["list"], input="{}", check=True)
    rows: list[dict[str, Any]] = json.loads(done.stdout)["machines"]
    return rows


def exec_pool(name: str, folder: Path, **fields: Any) -> dict[str, Any]:
    """Return a pool whose machines are processes, as it is in the file."""
    template = {
        **exec_commands(),
        "token_file": str(folder / "token"),
        "env": ["CLOUD_FOLDER", "CLOUD_LIMIT", "PYTHONPATH", "VCASGD_HOME"],
        "price_per_hour": 0.05,
        "on_demand_price_per_hour": 0.2,
    }
    return {"name": name, "provider": "exec", "template": template, **fields}


@contextmanager
def slurm_backend(folder: Path) -> Iterator[SlurmBackend]:
    with slurm_cluster(2) as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(cluster.configuration))
        try:
            yield SlurmBackend(cluster, folder)
        finally:
            cluster.run("scancel", "--me")
            await_truth(lambda: not cluster.jobs(), interval=0.2)


@contextmanager
def kubernetes_backend(folder: Path) -> Iterator[KubernetesBackend]:
    with FakeKubernetes(folder) as api, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(api.kubeconfig))
        kubelet = Kubelet(api, folder, {("join", "token"): "a-token"})
        try:
            yield KubernetesBackend(api)
        finally:
            kubelet.end()


@contextmanager
def aws_backend() -> Iterator[AwsBackend]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        with emulated_ec2() as ec2:
            patch.setenv("AWS_ENDPOINT_URL", ec2.url)
            yield AwsBackend(ec2)


@contextmanager
def gcp_backend() -> Iterator[GcpBackend]:
    with ComputeServer(FakeCompute()) as server:
        yield GcpBackend(server.compute, server.url)


@contextmanager
def local_backend(folder: Path) -> Iterator[LocalBackend]:
    with closing(LocalBackend(folder)) as backend:
        yield backend


@contextmanager
def exec_backend(folder: Path) -> Iterator[ExecBackend]:
    with pytest.MonkeyPatch.context() as patch, closing(ExecBackend(folder, patch)) as backend:
        yield backend


#: Contexts that yield a backend, whose machines and files can be in a folder.
BACKENDS: dict[str, Callable[[Path], AbstractContextManager[ProviderBackend]]] = {
    "local": local_backend,
    "aws": lambda _: aws_backend(),
    "gcp": lambda _: gcp_backend(),
    "slurm": slurm_backend,
    "kubernetes": kubernetes_backend,
    "exec": exec_backend,
}


def sleeper() -> Boot:
    """Return the boot command of the contract's tests."""
    return Boot(("sleep", "300"), {"GREETING": 'it\'s "$HOME"', "PATH": os.environ["PATH"]})


def script_of(user_data: str) -> str:
    """Return the script that our launch added to a machine's user data: its last part."""
    parts = email.message_from_string(user_data).get_payload()
    assert isinstance(parts, list)
    return str(parts[-1].get_payload())
