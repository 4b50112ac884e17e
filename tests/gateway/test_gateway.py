"""The port for machines that join: tokens, the API behind it, and its clear refusals."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from support.api_harness import spec, zipped
from support.gateways import MACHINE, RunningGateway, running_gateway
from support.ports import free_port
from support.waiting import PATIENCE, await_truth

import vcasgd
from vcasgd.agent.connection import AgentConnection, GatewayAddress, JoinToken
from vcasgd.encryption import self_signed
from vcasgd.errors import (
    ApiError,
    Conflict,
    Forbidden,
    NotFound,
    PackageError,
    SpecError,
    Unauthorized,
    VcasgdError,
)
from vcasgd.gateway.relay import ACCEPTED, pin_of
from vcasgd.schemas.fleet import WorkerOrder
from vcasgd.schemas.joining import JoinRequest, ReportBody, WorkerReport
from vcasgd.store import keys as names
from vcasgd.store.ledger.machines import JoinedMachines, WorkerOrders

#: The secret that a machine chooses for itself when it joins.
SECRET = "5ec2e7" * 8
PING = b"*1\r\n$4\r\nPING\r\n"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    home = tmp_path_factory.mktemp("gateway")
    # A machine counts as lost after 24 heartbeats, and no machine of these tests has any.
    with running_gateway(home, VCASGD_HEARTBEAT="60") as gateway:
        yield gateway


@pytest.fixture(autouse=True)
def volunteers(gateway: RunningGateway) -> Iterator[None]:
    """Forget everything, and publish the pool as the controller does."""
    gateway.api.connection.flushall()
    gateway.publish_pool()
    yield
    gateway.close_all()


# -- servers behind the port ----------------------------------------------------------------------


def test_a_server_answers_after_the_token(gateway: RunningGateway) -> None:
    for service in ("ledger", "tensors-0"):
        with gateway.connection(service, gateway.token(f"ann-{service}")) as (server, answer):
            assert answer == ACCEPTED
            server.sendall(PING)
            assert server.recv(100).startswith(b"-NOAUTH"), "and wants a password of its own"


@pytest.mark.parametrize("text", [f"vcasgd_eve_{'0' * 64}", "x", "bootstrap"])
def test_no_server_is_reachable_with_a_wrong_token(gateway: RunningGateway, text: str) -> None:
    text = gateway.api.token if text == "bootstrap" else text
    with gateway.connection("ledger", text) as (server, answer):
        assert answer == b"-the token is wrong or was revoked\n"
        assert server.recv(100) == b"", "the connection is closed"


@pytest.mark.parametrize("scope", ["read", "submit", "admin"])
def test_no_server_is_reachable_with_another_scope(gateway: RunningGateway, scope: str) -> None:
    with gateway.connection("ledger", gateway.token("ann", scope)) as (_, answer):
        assert answer == f"-the token has scope {scope}, not join\n".encode()


@pytest.mark.parametrize("service", ["api", "head", "tensors-1", "../ledger"])
def test_nothing_but_the_servers_is_reachable(gateway: RunningGateway, service: str) -> None:
    with gateway.connection(service, gateway.token("ann")) as (_, answer):
        assert answer == b"-there is no such service\n"


def test_a_server_that_is_down_is_named_as_the_reason(tmp_path: Path) -> None:
    down = f"redis://127.0.0.1:{free_port()}/0"
    with running_gateway(tmp_path, VCASGD_TENSORS_URL=down) as gateway:
        gateway.publish_pool()
        with gateway.connection("tensors-0", gateway.token("ann")) as (server, answer):
            assert answer == b"-the server behind the gateway does not answer\n"
            assert server.recv(100) == b"", "the connection is closed"


def test_an_expired_token_reaches_nothing(gateway: RunningGateway) -> None:
    text = gateway.token("ann", expires=1.0)

    def answer_of_the_ledger() -> bytes:
        with gateway.connection("ledger", text) as (_, answer):
            return answer

    await_truth(lambda: answer_of_the_ledger() == b"-the token has expired\n")
    with pytest.raises(Unauthorized, match="token ann has expired"):
        gateway.machine(text).join(MACHINE)


def test_revoking_a_token_closes_its_connections(gateway: RunningGateway) -> None:
    text = gateway.token("eve")
    with gateway.connection("ledger", text) as (server, answer), gateway.api.client() as client:
        assert answer == ACCEPTED
        client.revoke_token("eve")
        server.settimeout(PATIENCE)
        assert server.recv(100) == b""
    with gateway.connection("ledger", text) as (_, answer):
        assert answer == b"-the token is wrong or was revoked\n"


def test_garbage_ends_its_own_connection_only(gateway: RunningGateway) -> None:
    address = gateway.address()
    for garbage in (b"\n", b"ledger\n", b"\xff" * 3000 + b"\n", b"x" * 2_000_000, b"ledger"):
        with (
            socket.create_connection(("127.0.0.1", gateway.port), PATIENCE) as plain,
            address.server_tls.wrap_socket(plain) as tls,
        ):
            try:
                tls.sendall(garbage)
                plain.shutdown(socket.SHUT_WR)
                assert not tls.recv(4096).startswith(b"+")
            except (OSError, ssl.SSLError):
                pass
    with gateway.connection("ledger", gateway.token("ann")) as (_, answer):
        assert answer == ACCEPTED


# -- the API behind the port -----------------------------------------------------------------------


def test_the_api_answers_as_for_a_stranger(gateway: RunningGateway) -> None:
    tls = gateway.address().api_tls
    with httpx.Client(base_url=gateway.url, verify=tls, trust_env=False, timeout=PATIENCE) as one:
        assert one.get("/healthz").status_code == 200
        # Then nobody is taken for a process of the stack's own machine
        for more in ({}, {"X-Forwarded-For": "127.0.0.1"}, {"Forwarded": "for=127.0.0.1"}):
            assert one.get("/metrics", headers=more).status_code == 401
        joining = {"Authorization": f"Bearer {JoinToken.parse(gateway.token('ann')).text}"}
        assert one.get("/metrics", headers=joining).status_code == 403
        assert one.get("/api/v1/jobs", headers=joining).status_code == 403
        body = {"token": gateway.api.token}
        cookie = one.post("/api/v1/sign-in", json=body).headers["set-cookie"]
        assert "Secure" in cookie


def test_a_token_for_joining_opens_no_session(gateway: RunningGateway) -> None:
    text = JoinToken.parse(gateway.token("ann")).text
    with gateway.api.http() as http:
        assert http.post("sign-in", json={"token": text}).status_code == 403


def test_another_certificate_is_refused_before_the_token_is_sent(gateway: RunningGateway) -> None:
    with pytest.raises(ApiError, match="another certificate than the token names"):
        GatewayAddress.of(gateway.url, "0" * 64)
    unknown = AgentConnection(GatewayAddress.of(gateway.url, None), JoinToken("x"), "s")
    gateway.opened.append(unknown)
    with pytest.raises(ApiError, match=r"token names no certificate.*is not trusted") as caught:
        unknown.join(MACHINE)
    assert "the whole token that vcasgd token create NAME --join printed" in (
        caught.value.remedy or ""
    )


# -- joining ---------------------------------------------------------------------------------------


def test_a_token_of_another_scope_is_refused(gateway: RunningGateway) -> None:
    with pytest.raises(Unauthorized, match="ann has scope read, and machines need scope join"):
        gateway.machine(gateway.token("ann", "read")).check_token()


@pytest.mark.parametrize(
    ("right", "said"),
    [(False, "the token is wrong or was revoked"), (True, "torch can't be used on this machine")],
)
def test_a_token_is_judged_before_the_machine_is_measured(
    gateway: RunningGateway, tmp_path: Path, right: bool, said: str
) -> None:
    # Given a machine whose measurement fails, and says so
    (tmp_path / "torch.py").write_text("raise ImportError('measured')")
    text = gateway.token("ann") if right else "vcasgd_ann_" + "5" * 64

    done = subprocess.run(
        [sys.executable, "-m", "vcasgd.cli", "join", gateway.url, "--sandbox", "off"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
            "VCASGD_TOKEN": f"{JoinToken.parse(text).text}.{gateway.pin}",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )

    assert done.returncode == 1
    assert said in done.stderr
    assert ("measure" in done.stderr) == right


def test_a_token_names_the_certificate(gateway: RunningGateway) -> None:
    assert JoinToken.parse(gateway.token("ann")).pin == gateway.pin
    assert JoinToken.parse(gateway.token("bob", "read")).pin is None


def test_another_version_is_refused_with_the_one_to_install(gateway: RunningGateway) -> None:
    text = gateway.token("ann")
    body = JoinRequest(version="0.0.1", host="laptop", cpus=1, memory_mb=1).model_dump()
    with pytest.raises(Conflict, match=f"the stack has vcasgd {vcasgd.__version__}") as caught:
        gateway.transport(text).call("POST", "join", json=body)
    assert caught.value.remedy == f"pip install 'vcasgd[worker]=={vcasgd.__version__}'"


def test_too_many_machines_are_refused_until_one_leaves(gateway: RunningGateway) -> None:
    text = gateway.token("ann", max_machines=2)
    gateway.token("ann-2")
    first, second, third = (gateway.machine(text) for _ in range(3))
    first.join(MACHINE)
    second.join(MACHINE)
    with pytest.raises(Conflict, match="the token ann has joined as many machines as it may: 2"):
        third.join(MACHINE)
    # another user's limit is another one
    gateway.machine(gateway.token("bob", max_machines=1)).join(MACHINE)
    second.leave()
    third.join(MACHINE)


def test_all_machines_that_the_stack_orders_may_join(gateway: RunningGateway) -> None:
    machines = JoinedMachines(gateway.api.connection, PATIENCE)
    names = [f"join-gpu-0123456789ab-{number}" for number in range(101)]
    for name in names:
        request = MACHINE.model_copy(update={"machine": name})
        machines.join("pods", "0" * 64, "s", None, "gpu", request)
    assert {one.name for one, _, _ in machines.present()} >= {*names}
    machines.remove(*names)


def test_a_pool_without_room_refuses(gateway: RunningGateway) -> None:
    gateway.publish_pool(capacity=1, machines=1)
    with pytest.raises(Conflict, match="pool volunteers has 1 machines, which is its limit"):
        gateway.machine(gateway.token("ann")).join(MACHINE)


@pytest.mark.parametrize("pool", ["gone", "cloud"])
def test_a_pool_that_takes_no_machines_is_refused(gateway: RunningGateway, pool: str) -> None:
    # Given a token for a pool that is changed, or removed
    joined = {"position": 0, "provider": "join"}
    gateway.api.control.publish({}, {"cloud": joined, "gone": joined})
    text = gateway.token("ann", pool=pool)
    gateway.api.control.publish({}, {"cloud": {"position": 0, "provider": "aws"}})
    with pytest.raises(Conflict, match=f"no machine can join pool {pool}"):
        gateway.machine(text).join(MACHINE)


def test_ordered_machines_join_under_their_name_and_in_their_pool_only(
    gateway: RunningGateway,
) -> None:
    rows = {name: {"position": 0, "provider": "slurm"} for name in ("hpc", "other")}
    volunteers = {"position": 0, "provider": "join"}
    gateway.api.control.publish({}, {**rows, "volunteers": volunteers})
    hpc = gateway.token("ann", pool="hpc", max_machines=1)
    ordered = MACHINE.model_copy(update={"machine": "join-hpc-17-0"})
    for text, machine in (
        (gateway.token("eve", pool="other"), ordered),
        (gateway.token("bob"), ordered),
        (hpc, MACHINE),
        (hpc, MACHINE.model_copy(update={"machine": "join-ann-1a2b3c4d"})),
    ):
        with pytest.raises(Conflict):
            gateway.machine(text).join(machine)

    for _ in range(2):
        # an agent that lost the stack joins again, and is within the limit
        again = gateway.machine(hpc, SECRET)
        assert again.join(ordered).machine == "join-hpc-17-0"
    with pytest.raises(Conflict, match="join-hpc-17-0 has joined already"):
        gateway.machine(hpc).join(ordered)
    assert again.report(ReportBody()).orders == []
    with pytest.raises(Conflict, match="as many machines as it may: 1"):
        gateway.machine(hpc).join(MACHINE.model_copy(update={"machine": "join-hpc-17-1"}))


def test_a_token_needs_a_pool_to_join_and_no_other_one_has_it(gateway: RunningGateway) -> None:
    for scope, pool, problem in (
        ("join", None, "is required with scope join .choose from .*volunteers"),
        ("read", "volunteers", "is only for scope join .leave it out"),
    ):
        with pytest.raises(VcasgdError, match=f"pool: {problem}"):
            gateway.token("ann", scope, pool=pool)


def requests_of(machine: str) -> list[tuple[str, str]]:
    """Return the method and path of each request that a machine makes."""
    own = f"machines/{machine}"
    return [("POST", f"{own}/report"), ("GET", f"{own}/packages/{'0' * 64}"), ("DELETE", own)]


def test_machines_of_others_are_out_of_reach(gateway: RunningGateway) -> None:
    ann, eve = gateway.machine(gateway.token("ann")), gateway.token("eve")
    machine = ann.join(MACHINE).machine
    transport = gateway.transport(eve)
    for request in requests_of(machine):
        with pytest.raises(NotFound, match=f"no machine {machine} has joined"):
            transport.call(*request, json={})

    # Then also a later token of the same name doesn't have them
    with gateway.api.client() as client:
        client.revoke_token("ann")
    with pytest.raises(NotFound):
        gateway.transport(gateway.token("ann")).call("DELETE", f"machines/{machine}")


def test_a_token_alone_does_not_act_for_its_machines(gateway: RunningGateway) -> None:
    """The machines of a pool share the token, which the code of a job may find."""
    text = gateway.token("ann")
    machine = gateway.machine(text, SECRET)
    name = machine.join(MACHINE).machine
    order = WorkerOrder(worker=f"job.{name}", job="job", start="1", env={"VCASGD_LEDGER_URL": "s"})
    machines = JoinedMachines(gateway.api.connection, 8.0)
    WorkerOrders(gateway.api.connection).set({name: [order]})
    stored = gateway.api.connection.hget(names.JOINED, name)
    assert SECRET.encode() not in stored

    for secret in ("", "x" * 40, machines.get(name).secret):
        thief = gateway.transport(text, secret)
        for request in requests_of(name):
            with pytest.raises(NotFound, match=f"no machine {name} has joined with this token"):
                thief.call(*request, json={})
    machine.report(ReportBody())
    assert machines.orders_of(name) == [order]


def test_a_machine_needs_a_secret_that_can_not_be_guessed(gateway: RunningGateway) -> None:
    with pytest.raises(SpecError, match="X-Vcasgd-Machine: shorter than 32 characters"):
        gateway.machine(gateway.token("ann"), "short").join(MACHINE)


def test_a_machine_gets_the_code_and_the_orders_of_its_own_jobs_only(
    gateway: RunningGateway, tmp_path: Path
) -> None:
    package, other = zipped(), zipped()
    with gateway.api.client() as client:
        job, foreign = client.submit(spec(), package), client.submit(spec(name="other"), other)
    ann, bob = (gateway.machine(gateway.token(name)) for name in ("ann", "bob"))
    machine = ann.join(MACHINE).machine
    bob.join(MACHINE)
    order = WorkerOrder(
        worker=f"{job.id}.{machine}", job=job.id, start="1", env={"VCASGD_LEDGER_URL": "s"}
    )
    WorkerOrders(gateway.api.connection).set({machine: [order]})

    runs = {order.worker: WorkerReport(start=order.start)}
    (view,) = ann.report(ReportBody(workers=runs)).orders
    assert (view.job, view.env) == (job.id, {"VCASGD_LEDGER_URL": "s"})
    assert bob.report(ReportBody()).orders == []
    api = gateway.transport(gateway.token("carl"))
    with pytest.raises(NotFound):
        api.call("GET", f"machines/{machine}/packages/{view.package}")
    with pytest.raises(Forbidden):
        api.call("HEAD", f"packages/{view.package}")
    ann.fetch_code(view, tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / view.package]
    with pytest.raises(PackageError, match="MB unpacked, the limit is"):
        ann.fetch_code(view, tmp_path / "other", limit_bytes=1)
    assert not list((tmp_path / "other").iterdir())
    other_code = gateway.api.jobs.get(foreign.id).package
    with pytest.raises(NotFound, match="has no job with package"):
        ann.fetch_code(view.model_copy(update={"package": other_code}), tmp_path)


# -- its certificate -------------------------------------------------------------------------------


@pytest.fixture
def replaced(gateway: RunningGateway) -> Iterator[Callable[[bytes, bytes], None]]:
    """Write another certificate and its key, and tell the gateway; undo that at the end."""
    before = gateway.certificate.read_bytes(), gateway.key.read_bytes()

    def replace_with(certificate: bytes, key: bytes) -> None:
        gateway.certificate.write_bytes(certificate)
        gateway.key.write_bytes(key)
        os.kill(gateway.process.pid, signal.SIGHUP)

    yield replace_with
    replace_with(*before)
    await_truth(lambda: gateway.served() == gateway.pin)


def test_a_new_certificate_closes_no_connection(
    gateway: RunningGateway, replaced: Callable[[bytes, bytes], None]
) -> None:
    with gateway.connection("ledger", gateway.token("ann")) as (server, _):
        certificate, key = self_signed("renewed")
        replaced(certificate, key)
        await_truth(lambda: gateway.served() == pin_of(certificate.decode()))

        server.sendall(PING)
        assert server.recv(100).startswith(b"-NOAUTH")


def test_a_certificate_that_does_not_fit_its_key_changes_nothing(
    gateway: RunningGateway, replaced: Callable[[bytes, bytes], None]
) -> None:
    log = gateway.certificate.parents[1] / "gateway.log"
    replaced(self_signed("one")[0], self_signed("another")[1])
    await_truth(lambda: "the certificate stays as it was" in log.read_text())

    assert gateway.served() == gateway.pin
