"""The part of Kubernetes' API that pools and a kubelet use, over real HTTP."""

from __future__ import annotations

import json
import re
import threading
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

from support.http_servers import LocalServer, QuietHandler

Json = dict[str, Any]
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_ENDED = ("Succeeded", "Failed")


class FakeKubernetes(LocalServer):
    """Pods of one namespace, in memory."""

    def __init__(self, namespace: str, token: str) -> None:
        super().__init__(_Handler)
        self.namespace, self.token = namespace, token
        self.pods: dict[str, Json] = {}
        self.most_pods: int | None = None
        self.lock = threading.Lock()

    def list_pods(self, query: dict[str, str]) -> Json:
        wanted = [pair.split("=", 1) for pair in query.get("labelSelector", "").split(",") if pair]
        found = [
            pod
            for name, pod in sorted(self.pods.items())
            if all(pod["metadata"].get("labels", {}).get(key) == value for key, value in wanted)
        ]
        start = int(query.get("continue", 0))
        stop = start + int(query.get("limit") or len(found))
        metadata = {"continue": str(stop)} if stop < len(found) else {}
        return {"kind": "PodList", "metadata": metadata, "items": found[start:stop]}


class _Refused(Exception):
    def __init__(self, status: int, reason: str, message: str) -> None:
        self.status, self.reason, self.message = status, reason, message


class _Handler(QuietHandler):
    server: FakeKubernetes

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        body = json.loads(self.body() or b"{}")
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        with self.server.lock:
            try:
                status, answer = 200, self._answer(parts.path, query, body)
            except _Refused as refused:
                status = refused.status
                answer = {"kind": "Status", "status": "Failure", "message": refused.message,
                          "reason": refused.reason, "code": status}  # fmt: skip
            text = json.dumps(answer).encode()
        self.answer(status, text, Content_Type="application/json")

    do_GET = do_POST = do_DELETE = do_PATCH = _handle

    def _answer(self, path: str, query: dict[str, str], body: Json) -> Json:
        if self.headers.get("Authorization") != f"Bearer {self.server.token}":
            raise _Refused(401, "Unauthorized", "Unauthorized")
        prefix = f"/api/v1/namespaces/{self.server.namespace}/"
        if not path.startswith(prefix):
            raise _Refused(404, "NotFound", "namespaces not found")
        match self.command, path.removeprefix(prefix).split("/"):
            case "POST", ["pods"]:
                return self._create(body)
            case "GET", ["pods"]:
                return self.server.list_pods(query)
            case "DELETE", ["pods", name]:
                return self._delete(name, query.get("gracePeriodSeconds"))
            case "POST", ["pods", name, "binding"]:
                self._pod(name)["spec"]["nodeName"] = body["target"]["name"]
                return {"kind": "Status", "status": "Success"}
            case "PATCH", ["pods", name, "status"]:
                self._pod(name)["status"] |= body["status"]
                return self._pod(name)
            case ("POST", ["resourcequotas"]) | ("PATCH", ["resourcequotas", _, "status"]):
                hard = (body.get("spec") or body["status"])["hard"]
                self.server.most_pods = int(hard["pods"])
                return body
        raise _Refused(404, "NotFound", "the server could not find the requested resource")

    def _pod(self, name: str) -> Json:
        if name not in self.server.pods:
            raise _Refused(404, "NotFound", f'pods "{name}" not found')
        return self.server.pods[name]

    def _create(self, pod: Json) -> Json:
        pods, name = self.server.pods, str(pod["metadata"]["name"])
        containers = pod["spec"].get("containers") or [{}]
        if not _NAME.fullmatch(name) or not all(each.get("image") for each in containers):
            raise _Refused(422, "Invalid", f'Pod "{name}" is invalid: spec.containers: Required')
        if not isinstance(pod["spec"].get("nodeSelector", {}), dict):
            raise _Refused(400, "BadRequest", "Pod in version v1 cannot be handled: nodeSelector")
        if name in pods:
            raise _Refused(409, "AlreadyExists", f'pods "{name}" already exists')
        used = sum(each["status"]["phase"] not in _ENDED for each in pods.values())
        most = self.server.most_pods
        if most is not None and used >= most:
            text = f"requested: pods=1, used: pods={used}, limited: pods={most}"
            raise _Refused(
                403, "Forbidden", f'pods "{name}" is forbidden: exceeded quota: machines, {text}'
            )
        pod["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": _text(_now())}
        pods[name] = {**pod, "status": {"phase": "Pending"}}
        return pods[name]

    def _delete(self, name: str, grace: str | None) -> Json:
        pod = self._pod(name)
        seconds = int(grace or pod["spec"].get("terminationGracePeriodSeconds", 30))
        ended = pod["status"]["phase"] in _ENDED
        if grace == "0" or ended or "nodeName" not in pod["spec"]:
            return self.server.pods.pop(name)
        end = _text(_now() + timedelta(seconds=seconds))
        before = pod["metadata"].get("deletionTimestamp", end)
        pod["metadata"] |= {"deletionTimestamp": min(end, before)}
        return pod

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def _now() -> datetime:
    return datetime.now(UTC)


def _text(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
