"""Pods as machines, on an API server. Their commands are processes that wait."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.kubernetes import MISSING_IMAGE, FakeKubernetes, Kubelet
from support.ports import free_port
from support.waiting import PATIENCE, await_truth

from vcasgd.errors import (
    CloudDenied,
    CloudUnavailable,
    FleetError,
    InvalidRequest,
    NoCapacity,
    QuotaExceeded,
    SpecError,
    Throttled,
)
from vcasgd.fleet.pools import KubernetesPoolSpec, parse_pools
from vcasgd.fleet.providers import kubernetes as provider_module
from vcasgd.fleet.providers.base import MACHINE_ID, Boot, LaunchOrder
from vcasgd.fleet.providers.joining import JoinedFleet, ordered_name
from vcasgd.fleet.providers.kubernetes import KubernetesProvider, error_of, launch_name, manifest
from vcasgd.schemas.fleet import MachineState

SECRET = "a-token-that-nobody-sees"
#: Says what it gets, and waits for the notice.
MACHINE = """
trap 'echo notice; exit 0' TERM
echo "$0 $VCASGD_TOKEN $EXTRA"
while true; do sleep 0.1; done
"""
BOOT = Boot(("sh", "-c", MACHINE, MACHINE_ID))
FAILING = Boot(("sh", "-c", "echo no such model >&2; exit 3"))


def pool(**fields: Any) -> dict[str, Any]:
    template = {"image": "vcasgd:1", "token_secret": "join", "namespace": "training",
                "grace_seconds": 300, **fields.pop("template", {})}  # fmt: skip
    return {"name": "gpu", "provider": "kubernetes", "template": template, **fields}


def spec_of(**fields: Any) -> KubernetesPoolSpec:
    return KubernetesPoolSpec.model_validate(pool(**fields))


@pytest.fixture
def api(tmp_path: Path) -> Iterator[FakeKubernetes]:
    with FakeKubernetes(tmp_path) as api, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(api.kubeconfig))
        patch.setattr(provider_module, "_TIMEOUT", (PATIENCE, PATIENCE))
        yield api


@pytest.fixture
def kubelet(api: FakeKubernetes, tmp_path: Path) -> Iterator[Kubelet]:
    kubelet = Kubelet(api, tmp_path, {("join", "token"): SECRET})
    yield kubelet
    kubelet.end()


@pytest.fixture
def provider(api: FakeKubernetes, kubelet: Kubelet) -> Iterator[KubernetesProvider]:
    env = [{"name": "EXTRA", "value": "more"}]
    specs = [
        spec_of(template={"container": {"env": env}}),
        spec_of(name="lost", template={"image": MISSING_IMAGE}),
    ]
    provider = KubernetesProvider("c", specs, JoinedFleet())
    yield provider
    provider.close()


def test_machines_run_get_a_notice_and_end(
    api: FakeKubernetes, provider: KubernetesProvider, kubelet: Kubelet
) -> None:
    # Given machines
    names = drained, evicted, killed = provider.launch("gpu", 3, BOOT, "token-1")
    await_truth(lambda: [each.state for each in provider.machines()] == [MachineState.RUNNING] * 3)
    await_truth(lambda: all(kubelet.log_of(each) == f"{each} {SECRET} more\n" for each in names))
    assert SECRET not in str(api.pods()), "it is in the secret only"

    # When one's node is drained, then it has a notice
    api.delete(drained)
    for one in provider.machines():  # It may have left already.
        assert (one.state is MachineState.LEAVING) == (one.id == drained)
        assert (one.notice_at is not None) == (one.id == drained)
    # When others are evicted and killed, then only the evicted one has a notice, too
    provider.evict(evicted, PATIENCE)
    provider.kill(killed)
    await_truth(lambda: provider.machines() == [])
    assert ["notice" in kubelet.log_of(each) for each in names] == [True, True, False]


def test_container_that_does_not_start_or_fails_says_why(provider: KubernetesProvider) -> None:
    (lost,) = provider.launch("lost", 1, BOOT, "token-3")
    (failing,) = provider.launch("gpu", 1, FAILING, "token-4")

    def problem(machine: str) -> str:
        provider.machines()
        return provider.boot_error(machine) or ""

    await_truth(lambda: "ErrImagePull: no such host" in problem(lost))
    await_truth(lambda: "no such model" in problem(failing))
    (one,) = provider.machines()
    assert (one.id, one.state) == (lost, MachineState.BOOTING)


def test_containers_that_the_cluster_adds_do_not_count(api: FakeKubernetes) -> None:
    # Given a pod with a sidecar, of which the API server lists the sidecar first
    provider = KubernetesProvider("c", [spec_of()], JoinedFleet())
    (machine,) = provider.launch("gpu", 1, BOOT, "token-10")
    (listed,) = provider.machines()
    assert listed.state is MachineState.WAITING, "no node has it"
    own = {"image": "vcasgd:1", "imageID": "", "ready": False, "restartCount": 0}
    sidecar = {**own, "name": "proxy", "state": {"running": {}}}

    def report(phase: str, **state: Any) -> str | None:
        rows = [sidecar, {**own, "name": "machine", "state": state}]
        api.pods()[machine]["status"] |= {"phase": phase, "containerStatuses": rows}
        assert [one.id for one in provider.machines()] == [machine]
        return provider.boot_error(machine)

    # When its own container can't start, or ends while the sidecar runs on, then it is known why
    waiting = {"reason": "ErrImagePull", "message": "no such host"}
    assert report("Pending", waiting=waiting) == "ErrImagePull: no such host"
    assert report("Running", running={}) is None
    ended = {"exitCode": 3, "reason": "Error", "message": "no such model"}
    assert report("Running", terminated=ended) == "Error: no such model"


def test_pods_that_ended_are_deleted_after_a_while(
    api: FakeKubernetes, provider: KubernetesProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine,) = provider.launch("gpu", 1, FAILING, "token-5")
    await_truth(lambda: provider.boot_error(machine) if provider.machines() == [] else None)
    assert machine in api.pods()

    monkeypatch.setattr(provider_module, "KEPT_SECONDS", -60.0)
    provider.machines()

    await_truth(lambda: machine not in api.pods())


def test_pods_of_others_are_no_machines(api: FakeKubernetes, provider: KubernetesProvider) -> None:
    for name, labels in {
        "other": {"vcasgd.dev/cluster": "c", "vcasgd.dev/pool": "gpu"},
        "join-gpu-0123456789ab-0": {"vcasgd.dev/cluster": "c", "vcasgd.dev/pool": "lost"},
        "join-gpu-0123456789ab-1": {"vcasgd.dev/cluster": "another", "vcasgd.dev/pool": "gpu"},
    }.items():
        container = {"name": "machine", "image": "vcasgd:1", "command": ["sleep", "60"]}
        api.create(
            {"metadata": {"name": name, "labels": labels}, "spec": {"containers": [container]}}
        )

    assert provider.machines() == []
    provider.kill("other")
    assert {"other", "join-gpu-0123456789ab-1"} <= api.pods().keys()


def test_long_list_is_read_to_its_end(
    provider: KubernetesProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vcasgd.fleet.providers.kubernetes._PAGE", 2)
    machines = provider.launch("gpu", 5, BOOT, "token-6")
    assert sorted(one.id for one in provider.machines()) == machines


def test_quota_ends_a_launch(api: FakeKubernetes, provider: KubernetesProvider) -> None:
    api.limit_pods(1)
    (machine,) = provider.launch("gpu", 3, BOOT, "token-7")
    with pytest.raises(QuotaExceeded, match="exceeded quota"):
        provider.launch("gpu", 1, BOOT, "token-8")
    assert [one.id for one in provider.machines()] == [machine]


def test_requests_for_many_pods_do_not_wait_for_each_other(
    api: FakeKubernetes, provider: KubernetesProvider
) -> None:
    api.meeting = threading.Barrier(5, timeout=5)
    machines = provider.launch("gpu", 10, BOOT, "token-9")
    assert len(machines) == 10
    provider.terminate(*machines)
    assert not api.meeting.broken


def test_what_the_api_server_refuses_is_named(
    api: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def provider(**fields: Any) -> KubernetesProvider:
        return KubernetesProvider("c", [spec_of(**fields)], JoinedFleet())

    wrong = provider(template={"pod": {"nodeSelector": "spot"}})
    with pytest.raises(InvalidRequest, match="nodeSelector"):
        wrong.launch("gpu", 1, BOOT, "token-9")
    # The rights of the control plane end at its namespace.
    with pytest.raises((InvalidRequest, CloudDenied), match=r"not found|cannot list"):
        provider(template={"namespace": "nowhere"}).launch("gpu", 1, BOOT, "token-9")
    with pytest.raises(NoCapacity):
        provider().launch("gpu", 1, BOOT, "token-9", spot=False)
    monkeypatch.setenv("KUBECONFIG", str(api.write_kubeconfig(tmp_path / "stranger", "no token")))
    with pytest.raises(CloudDenied):
        provider().machines()
    text = (tmp_path / "stranger").read_text().replace(api.url, f"http://127.0.0.1:{free_port()}")
    (tmp_path / "stranger").write_text(text)
    with pytest.raises(CloudUnavailable, match="doesn't answer"):
        provider().machines()
    (tmp_path / "damaged").write_text("users: [")
    for name in ("missing", "damaged"):
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / name))
        with pytest.raises(InvalidRequest, match="no access") as caught:
            provider()
        assert "KUBECONFIG" in (caught.value.remedy or "")


def test_a_program_for_credentials_that_hangs_is_ended(
    api: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a program beside the kubeconfig whose credentials have expired, and that then hangs
    (tmp_path / "login").write_text(
        f"#!/bin/sh\n[ -e used ] && exec sleep \"$2\"\ntouch used\nprintf %s '{_credential(api)}'\n"
    )
    (tmp_path / "login").chmod(0o755)
    plugin = {"apiVersion": _VERSION, "command": "./login", "args": ["for", "600"]}
    monkeypatch.setenv("KUBECONFIG", str(api.write_kubeconfig(tmp_path / "config", exec=plugin)))
    before = (tmp_path / "config").read_text()
    monkeypatch.setattr(provider_module, "PLUGIN_SECONDS", 0.5)

    # When it is asked, then each call ends soon
    provider = KubernetesProvider("c", [spec_of()], JoinedFleet())
    began = time.monotonic()
    assert provider.machines() == []
    assert 0.5 <= time.monotonic() - began < PATIENCE

    # And a new provider, without credentials, says what to look at
    with pytest.raises(CloudDenied) as caught:
        KubernetesProvider("c", [spec_of()], JoinedFleet()).machines()
    assert "program for credentials" in (caught.value.remedy or "")
    assert (tmp_path / "config").read_text() == before


_VERSION = "client.authentication.k8s.io/v1"


def _credential(api: FakeKubernetes) -> str:
    status = {"token": api.token, "expirationTimestamp": "2020-01-01T00:00:00Z"}
    return json.dumps({"apiVersion": _VERSION, "kind": "ExecCredential", "status": status})


# -- pure parts -----------------------------------------------------------------------------------

STATUS = '{{"kind": "Status", "reason": "{}", "message": "{}"}}'


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (403, STATUS.format("Forbidden", "exceeded quota: machines"), QuotaExceeded),
        (403, STATUS.format("Forbidden", "cannot create pods"), CloudDenied),
        (401, STATUS.format("Unauthorized", "Unauthorized"), CloudDenied),
        (404, STATUS.format("NotFound", "namespaces not found"), InvalidRequest),
        (409, STATUS.format("Conflict", "try again"), CloudUnavailable),
        (422, STATUS.format("Invalid", "spec.x"), InvalidRequest),
        (429, STATUS.format("TooManyRequests", "wait"), Throttled),
        (500, "<html>", CloudUnavailable),
        (503, None, CloudUnavailable),
        (502, "[1]", CloudUnavailable),
    ],
)
def test_answers_of_the_api_server_are_errors_of_the_fleet(
    status: int, body: str | None, kind: type[FleetError]
) -> None:
    error = error_of(status, body, "gpu")
    assert isinstance(error, kind)
    assert error.message.startswith("gpu: ")


def test_names_of_launches_differ_by_cluster_and_pool() -> None:
    names = {launch_name(c, p, t) for c in ("a", "b") for p in ("x", "y") for t in ("1", "2")}
    assert len(names) == 8
    assert len(ordered_name("p" * 20, "0" * 12, 9999)) <= 63, "the limit of a host's name"


def test_manifest_has_the_users_fields_and_ours() -> None:
    template = {
        "memory": "8Gi",
        "pod": {"tolerations": [{"key": "spot"}], "automountServiceAccountToken": True},
        "container": {"env": [{"name": "A", "value": "1"}], "workingDir": "/tmp"},
    }
    spec = spec_of(zones=["z1", "z2"], cpus=4, gpus=2, template=template)
    boot = Boot(("run", MACHINE_ID))
    order = LaunchOrder(spec, 1, boot, "t", ("z2",), ("node",), spot=True)
    made = manifest(order, "c", "0" * 12, 0)

    (container,) = made["spec"]["containers"]
    assert container["command"] == ["run", "join-gpu-000000000000-0"]
    assert [each["name"] for each in container["env"]] == ["A", "VCASGD_TOKEN"]
    assert container["resources"] == {
        "requests": {"cpu": "4", "memory": "8Gi"},
        "limits": {"memory": "8Gi", "nvidia.com/gpu": "2"},
    }
    assert container["workingDir"] == "/tmp"
    assert made["spec"]["tolerations"] == [{"key": "spot"}]
    assert made["spec"]["automountServiceAccountToken"] is True
    assert made["spec"]["restartPolicy"] == "Never"
    expression = {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["z2"]}
    assert str(expression) in str(made["spec"]["affinity"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "p" * 21}, "name has more than 20 letters"),
        ({"template": {"pod": {"containers": []}}}, "containers is set by the stack"),
        ({"template": {"container": {"image": "x"}}}, "image is set by the stack"),
        ({"template": {"container": {"env": "A"}}}, "env must be a list"),
        ({"template": {"token_secret": "Not A Name"}}, "template.token_secret"),
        ({"template": {"pod": {"affinity": {}}}, "zones": ["a"]}, "affinity excludes zones"),
        ({"template": {"unknown": 1}}, "template.unknown"),
    ],
)
def test_wrong_fields_of_a_pool_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_pools({"pools": [pool(**fields)]})
    assert message in str(caught.value)


@pytest.mark.parametrize("answer", [{}, {"metadata": {}, "items": [{"metadata": 5}]}])
def test_list_that_can_not_be_read_is_no_empty_list(
    answer: dict[str, Any], api: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "list_pods", lambda _query: answer)
    with pytest.raises(CloudUnavailable, match="can't be read"):
        KubernetesProvider("c", [spec_of()], JoinedFleet()).machines()
