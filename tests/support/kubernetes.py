"""A Kubernetes cluster without containers: an API server, and a kubelet that runs processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from support.children import die_with_parent
from support.http_servers import LocalServer, QuietHandler

NAMESPACE = "training"
#: An image that no registry has.
MISSING_IMAGE = "registry.invalid/missing:1"
Json = dict[str, Any]
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_ENDED = ("Succeeded", "Failed")


class _Refused(Exception):
    def __init__(self, status: int, reason: str, message: str) -> None:
        self.status, self.reason, self.message = status, reason, message


class FakeKubernetes(LocalServer):
    """The part of Kubernetes' API that pools use, with the pods of one namespace in memory.

    Its methods are an administrator's access.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(_Handler)
        self.token = secrets.token_hex(8)
        self.lock = threading.RLock()
        self._pods: dict[str, Json] = {}
        self._most_pods: int | None = None
        #: Barrier at which creations and deletions wait, to show how many run at the same time.
        self.meeting: threading.Barrier | None = None
        self.kubeconfig = self.write_kubeconfig(folder / "kubeconfig", self.token)

    def write_kubeconfig(self, path: Path, token: str = "", **user: Json) -> Path:
        """Write a kubeconfig with a token, or with other fields of its user."""
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": user or {"token": token}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "c",
        }
        path.write_text(yaml.safe_dump(content))
        return path

    def pods(self) -> dict[str, Json]:
        with self.lock:
            return dict(sorted(self._pods.items()))

    def machines(self, phase: str = "Running") -> list[str]:
        """Return the names of pods in a phase that aren't being deleted."""
        return [
            name
            for name, pod in self.pods().items()
            if pod["status"]["phase"] == phase and "deletionTimestamp" not in pod["metadata"]
        ]

    def limit_pods(self, most: int) -> None:
        """Set the namespace's quota."""
        self._most_pods = most

    def list_pods(self, query: Mapping[str, str]) -> Json:
        wanted = [pair.split("=", 1) for pair in query.get("labelSelector", "").split(",") if pair]
        found = [
            pod
            for pod in self.pods().values()
            if all(pod["metadata"].get("labels", {}).get(key) == value for key, value in wanted)
        ]
        start = int(query.get("continue", 0))
        stop = start + int(query.get("limit") or len(found))
        metadata = {"continue": str(stop)} if stop < len(found) else {}
        return {"kind": "PodList", "metadata": metadata, "items": found[start:stop]}

    def create(self, pod: Json) -> Json:
        name = str(pod["metadata"]["name"])
        containers = pod["spec"].get("containers") or [{}]
        if not _NAME.fullmatch(name) or not all(each.get("image") for each in containers):
            raise _Refused(422, "Invalid", f'Pod "{name}" is invalid: spec.containers: Required')
        if not isinstance(pod["spec"].get("nodeSelector", {}), dict):
            raise _Refused(400, "BadRequest", "Pod in version v1 cannot be handled: nodeSelector")
        with self.lock:
            if name in self._pods:
                raise _Refused(409, "AlreadyExists", f'pods "{name}" already exists')
            used = sum(each["status"]["phase"] not in _ENDED for each in self._pods.values())
            if self._most_pods is not None and used >= self._most_pods:
                text = f"requested: pods=1, used: pods={used}, limited: pods={self._most_pods}"
                raise _Refused(403, "Forbidden", f"forbidden: exceeded quota: machines, {text}")
            pod["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": _text()}
            self._pods[name] = {**pod, "status": {"phase": "Pending"}}
            return self._pods[name]

    def delete(self, name: str, grace_seconds: int | None = None) -> Json:
        """Delete a pod, as the drain of its node does."""
        with self.lock:
            if name not in self._pods:
                raise _Refused(404, "NotFound", f'pods "{name}" not found')
            pod = self._pods[name]
            if grace_seconds is None:
                grace_seconds = int(pod["spec"].get("terminationGracePeriodSeconds", 30))
            started = "nodeName" in pod["spec"] and pod["status"]["phase"] not in _ENDED
            if grace_seconds == 0 or not started:
                return self._pods.pop(name)
            end = _text(grace_seconds)
            before = pod["metadata"].get("deletionTimestamp", end)
            pod["metadata"] |= {"deletionTimestamp": min(end, before)}
            return pod

    def remove(self, name: str) -> None:
        """Delete a pod at once, if there is one."""
        with contextlib.suppress(_Refused):
            self.delete(name, 0)


class _Handler(QuietHandler):
    server: FakeKubernetes

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        body = json.loads(self.body() or b"{}")
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if self.server.meeting is not None and self.command != "GET":
            with contextlib.suppress(threading.BrokenBarrierError):
                self.server.meeting.wait()
        with self.server.lock:
            try:
                status, answer = 200, self._answer(parts.path, query, body)
            except _Refused as refused:
                status = refused.status
                answer = {"kind": "Status", "status": "Failure", "message": refused.message,
                          "reason": refused.reason, "code": status}  # fmt: skip
            text = json.dumps(answer).encode()
        self.answer(status, text, Content_Type="application/json")

    do_GET = do_POST = do_DELETE = _handle

    def _answer(self, path: str, query: dict[str, str], body: Json) -> Json:
        if self.headers.get("Authorization") != f"Bearer {self.server.token}":
            raise _Refused(401, "Unauthorized", "Unauthorized")
        prefix = f"/api/v1/namespaces/{NAMESPACE}/"
        if not path.startswith(prefix):
            raise _Refused(404, "NotFound", "namespaces not found")
        match self.command, path.removeprefix(prefix).split("/"):
            case "POST", ["pods"]:
                return self.server.create(body)
            case "GET", ["pods"]:
                return self.server.list_pods(query)
            case "DELETE", ["pods", name]:
                grace = query.get("gracePeriodSeconds")
                return self.server.delete(name, None if grace is None else int(grace))
        raise _Refused(404, "NotFound", "the server could not find the requested resource")


class Kubelet:
    """A node: it runs the command of each pod as a process, and reports how it is.

    ``secrets`` are the values of keys, by name of the secret and key.
    """

    def __init__(
        self, api: FakeKubernetes, folder: Path, values: Mapping[tuple[str, str], str]
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
                with self._api.lock:
                    self._step()
            except Exception as error:  # noqa: BLE001  # the test raises it at the end
                self.errors.append(error)
                return

    def _step(self) -> None:
        pods = self._api.pods()
        for name in self._processes.keys() - pods.keys():
            self._kill(name)
        for name, pod in pods.items():
            if name in self._processes:
                self._follow(name, pod)
            elif pod["status"]["phase"] == "Pending":
                self._start(name, pod)

    def _start(self, name: str, pod: Json) -> None:
        (container,) = pod["spec"]["containers"]
        pod["spec"]["nodeName"] = "node"
        if "deletionTimestamp" in pod["metadata"]:
            self._api.remove(name)
            return
        if container["image"] == MISSING_IMAGE:
            waiting = {"reason": "ErrImagePull", "message": "no such host"}
            _report(pod, "Pending", {"waiting": waiting})
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
        _report(pod, "Running", {"running": {"startedAt": _text()}})

    def _value(self, variable: Json) -> str:
        if "value" in variable:
            return str(variable["value"])
        key = variable["valueFrom"]["secretKeyRef"]
        return self._values[key["name"], key["key"]]

    def _follow(self, name: str, pod: Json) -> None:
        process, deletion = self._processes[name], pod["metadata"].get("deletionTimestamp")
        if process.poll() is None:
            if deletion and name not in self._noticed:
                self._noticed.add(name)
                process.send_signal(signal.SIGTERM)
            if deletion and datetime.now(UTC) > datetime.fromisoformat(deletion):
                self._kill(name)
        elif deletion:
            self._api.remove(name)
        elif pod["status"]["phase"] == "Running":
            ended = {"exitCode": process.returncode, "reason": "Error", "finishedAt": _text(),
                     "message": self.log_of(name)[-2000:]}  # fmt: skip
            phase = "Failed" if process.returncode else "Succeeded"
            _report(pod, phase, {"terminated": ended})

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


def _report(pod: Json, phase: str, state: Json) -> None:
    (container,) = pod["spec"]["containers"]
    row = {"name": container["name"], "image": container["image"], "imageID": "", "ready": True,
           "restartCount": 0, "state": state}  # fmt: skip
    pod["status"] |= {"phase": phase, "startTime": _text(), "containerStatuses": [row]}


def _text(seconds: float = 0.0) -> str:
    """Return the time in some seconds, as Kubernetes writes it."""
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
