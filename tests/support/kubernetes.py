"""A Kubernetes cluster without containers: an API server, and a kubelet that runs processes.

The API server is the real one, with etcd, if both programs are there; else one that answers alike.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import shutil
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from support.fake_kubernetes import FakeKubernetes
from support.harness import Process, die_with_parent
from support.ports import free_port
from support.waiting import await_truth

NAMESPACE = "training"
MANIFESTS = Path(__file__).parents[2] / "infra" / "kubernetes"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
#: An image that no registry has.
MISSING_IMAGE = "registry.invalid/missing:1"
Json = dict[str, Any]


class KubernetesApi:
    """An administrator's access to an API server."""

    def __init__(self, url: str, token: str, folder: Path, authority: Path | None = None) -> None:
        verify = ssl.create_default_context(cafile=authority) if authority else True
        self.url, self._token, self._authority = url, token, authority
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            verify=verify,
            trust_env=False,
            timeout=30,
        )
        self.kubeconfig = self.write_kubeconfig(folder / "kubeconfig", token)

    def write_kubeconfig(self, path: Path, token: str) -> Path:
        cluster = {"server": self.url}
        if self._authority:
            data = base64.b64encode(self._authority.read_bytes()).decode()
            cluster["certificate-authority-data"] = data
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "c",
        }
        path.write_text(yaml.safe_dump(content))
        return path

    def call(self, method: str, path: str, body: Json | None = None, **options: Any) -> Json:
        answer = self._http.request(method, path, json=body, **options)
        assert answer.is_success, f"{method} {path}: {answer.text}"
        return dict(answer.json())

    def pods(self) -> dict[str, Json]:
        items = self.call("GET", PODS)["items"]
        return {each["metadata"]["name"]: each for each in items}

    def machines(self, phase: str = "Running") -> list[str]:
        """Return the names of pods in a phase that aren't being deleted."""
        return sorted(
            name
            for name, pod in self.pods().items()
            if pod["status"].get("phase") == phase and "deletionTimestamp" not in pod["metadata"]
        )

    def drain(self, name: str) -> None:
        """Delete a pod as the drain of its node does."""
        self.call("DELETE", f"{PODS}/{name}")

    def change(self, method: str, path: str, body: Json | None = None, **options: Any) -> None:
        """Call the API about a pod that may be gone or be deleted meanwhile."""
        answer = self._http.request(method, f"{PODS}/{path}", json=body, **options)
        assert answer.is_success or answer.status_code in (404, 409), answer.text

    def remove(self, name: str) -> None:
        """Delete a pod at once, if there is one."""
        self.change("DELETE", name, params={"gracePeriodSeconds": "0"})

    def limit_pods(self, most: int) -> None:
        """Set the namespace's quota, as Kubernetes' controllers would."""
        path = f"/api/v1/namespaces/{NAMESPACE}/resourcequotas"
        used = sum(pod["status"].get("phase") in ("Pending", "Running")
                   for pod in self.pods().values())  # fmt: skip
        quota = {"metadata": {"name": "machines"}, "spec": {"hard": {"pods": str(most)}}}
        self.call("POST", path, quota)
        status = {"status": {"hard": {"pods": str(most)}, "used": {"pods": str(used)}}}
        merge = {"Content-Type": "application/merge-patch+json"}
        self.call("PATCH", f"{path}/machines/status", status, headers=merge)

    def close(self) -> None:
        self._http.close()


class Kubelet:
    """A node: it runs the command of each pod as a process, and reports how it is.

    ``secrets`` are the values of keys, by name of the secret and key.
    """

    def __init__(
        self, api: KubernetesApi, folder: Path, values: Mapping[tuple[str, str], str]
    ) -> None:
        self._api, self._folder, self._values = api, folder, values
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._noticed: set[str] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.errors: list[Exception] = []
        self._thread.start()

    def log_of(self, name: str) -> str:
        path = self._folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def _run(self) -> None:
        while not self._stopped.wait(0.1):
            try:
                self._step()
            except Exception as error:  # noqa: BLE001  # the test raises it at the end
                self.errors.append(error)
                return

    def _step(self) -> None:
        pods = self._api.pods()
        for name in self._processes.keys() - pods.keys():
            self._kill(name)
        for name, pod in pods.items():
            if "nodeName" not in pod["spec"]:
                target = {"apiVersion": "v1", "kind": "Node", "name": "node"}
                binding = {"apiVersion": "v1", "kind": "Binding",
                           "metadata": {"name": name}, "target": target}  # fmt: skip
                self._api.change("POST", f"{name}/binding", binding)
            elif name not in self._processes and pod["status"].get("phase") == "Pending":
                self._start(name, pod)
            elif name in self._processes:
                self._follow(name, pod)
            elif "deletionTimestamp" in pod["metadata"]:
                self._api.remove(name)

    def _start(self, name: str, pod: Json) -> None:
        if "deletionTimestamp" in pod["metadata"]:
            self._api.remove(name)
            return
        (container,) = pod["spec"]["containers"]
        if container["image"] == MISSING_IMAGE:
            waiting = {"reason": "ErrImagePull", "message": "no such host"}
            self._report(name, container, "Pending", {"waiting": waiting})
            return
        own = {each["name"]: self._value(each) for each in container.get("env", ())}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                container["command"],
                stdout=log,
                stderr=log,
                env={"PATH": path, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                     "TMPDIR": str(self._folder), "HOME": str(self._folder), **own},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )  # fmt: skip
        self._report(name, container, "Running", {"running": {"startedAt": _now()}})

    def _value(self, variable: Json) -> str:
        if "value" in variable:
            return str(variable["value"])
        key = variable["valueFrom"]["secretKeyRef"]
        return self._values[key["name"], key["key"]]

    def _follow(self, name: str, pod: Json) -> None:
        process, (container,) = self._processes[name], pod["spec"]["containers"]
        deletion = pod["metadata"].get("deletionTimestamp")
        if process.poll() is None:
            if deletion and name not in self._noticed:
                self._noticed.add(name)
                process.send_signal(signal.SIGTERM)
            if deletion and datetime.now(UTC) > datetime.fromisoformat(deletion):
                self._kill(name)
        elif deletion:
            self._api.remove(name)
        elif pod["status"]["phase"] == "Running":
            ended = {"exitCode": process.returncode, "reason": "Error", "finishedAt": _now(),
                     "message": self.log_of(name)[-2000:]}  # fmt: skip
            phase = "Failed" if process.returncode else "Succeeded"
            self._report(name, container, phase, {"terminated": ended})

    def _report(self, name: str, container: Json, phase: str, state: Json) -> None:
        row = {"name": container["name"], "image": container["image"], "imageID": "", "ready": True,
               "restartCount": 0, "state": state}  # fmt: skip
        status = {"phase": phase, "startTime": _now(), "containerStatuses": [row]}
        merge = {"Content-Type": "application/merge-patch+json"}
        self._api.change("PATCH", f"{name}/status", {"status": status}, headers=merge)

    def _kill(self, name: str) -> None:
        process = self._processes[name]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def end(self) -> None:
        self._stopped.set()
        self._thread.join(30)
        for name in self._processes:
            self._kill(name)
        assert self.errors == []


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@contextlib.contextmanager
def api_server(kind: str, folder: Path) -> Iterator[KubernetesApi]:
    """Run an API server of kind ``fake`` or ``real``. Skip the test without the real one."""
    make = _fake if kind == "fake" else _real
    with make(folder) as api:
        yield api
        api.close()


@contextlib.contextmanager
def _fake(folder: Path) -> Iterator[KubernetesApi]:
    with FakeKubernetes(NAMESPACE, secrets.token_hex(8)) as server:
        yield KubernetesApi(server.url, server.token, folder)


@contextlib.contextmanager
def _real(folder: Path) -> Iterator[KubernetesApi]:
    program, etcd = os.environ.get("VCASGD_KUBE_APISERVER"), shutil.which("etcd")
    program = program or shutil.which("kube-apiserver")
    if not program or not etcd:
        pytest.skip("VCASGD_KUBE_APISERVER names no kube-apiserver, or there is no etcd")
    token, own, processes = secrets.token_hex(16), secrets.token_hex(16), list[Process]()
    (folder / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n{own},stack,stack\n')
    subprocess.run(
        ["openssl", "genrsa", "-out", folder / "service.key", "2048"],
        check=True,
        capture_output=True,
    )
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    port = free_port()
    try:
        processes.append(Process(
            [etcd, "--data-dir", str(folder / "etcd"), "--listen-client-urls", client,
             "--advertise-client-urls", client, "--listen-peer-urls", peer,
             "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"],
            folder / "etcd.log"))  # fmt: skip
        processes.append(Process(
            [program, f"--etcd-servers={client}", f"--secure-port={port}",
             "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1",
             f"--cert-dir={folder / 'certificates'}", f"--token-auth-file={folder / 'tokens.csv'}",
             "--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount",
             "--service-account-issuer=https://kubernetes.default.svc",
             f"--service-account-key-file={folder / 'service.key'}",
             f"--service-account-signing-key-file={folder / 'service.key'}",
             "--service-cluster-ip-range=10.0.0.0/24"],
            folder / "apiserver.log"))  # fmt: skip
        certificate = folder / "certificates" / "apiserver.crt"
        await_truth(certificate.exists)
        api = KubernetesApi(f"https://127.0.0.1:{port}", token, folder, certificate)
        await_truth(lambda: _answers(lambda: api.call("GET", "/api/v1/namespaces/default")))
        api.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        _allow(api)
        api.write_kubeconfig(api.kubeconfig, own)
        yield api
    finally:
        for process in reversed(processes):
            process.end()


def _allow(api: KubernetesApi) -> None:
    """Give the user ``stack`` the rights of a control plane in the cluster, and no others."""
    _, role, binding = yaml.safe_load_all((MANIFESTS / "access.yaml").read_text())
    binding["subjects"] = [{"kind": "User", "name": "stack"}]
    for kind, body in (("roles", role), ("rolebindings", binding)):
        path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/{kind}"
        api.call("POST", path, body)


def _answers(call: Callable[[], object]) -> bool:
    try:
        call()
    except (AssertionError, httpx.TransportError):
        return False
    return True
