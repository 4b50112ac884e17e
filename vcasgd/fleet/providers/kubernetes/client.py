"""Kubernetes' official client. The only module that imports it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import urllib3
from kubernetes import client, config
from pydantic import ValidationError

from vcasgd.errors import (
    CloudDenied,
    CloudUnavailable,
    FleetError,
    InvalidRequest,
    QuotaExceeded,
    Throttled,
)
from vcasgd.fleet.providers.errors import fleet_error

#: Seconds to connect, and to wait for an answer.
_TIMEOUT = (5, 20)
#: Pods in one answer.
_PAGE = 500


class KubernetesClient:
    """Pods of one namespace. Methods raise :class:`~vcasgd.errors.FleetError`.

    ``context``: one of the kubeconfig; None means its current one, or the service account of the
    pod in which this runs.
    """

    def __init__(self, namespace: str, context: str | None) -> None:
        self._namespace = namespace
        self._core = client.CoreV1Api(_api_client(context))

    def create(self, manifest: Mapping[str, Any], pool: str) -> bool:
        """Create a pod. Returns False if there is one with its name."""
        try:
            with _errors(pool):
                self._core.create_namespaced_pod(
                    self._namespace, manifest, _request_timeout=_TIMEOUT, _preload_content=False
                ).release_conn()
        except _AlreadyExists:
            return False
        return True

    def page(self, labels: Mapping[str, str], after: str | None = None) -> bytes:
        """Return a page of the list of pods with these labels, as JSON.

        ``after``: where the page before says that the list continues.
        """
        selector = ",".join(f"{name}={value}" for name, value in labels.items())
        begin = {"_continue": after} if after else {}
        with _errors():
            answer = self._core.list_namespaced_pod(
                self._namespace,
                label_selector=selector,
                limit=_PAGE,
                _request_timeout=_TIMEOUT,
                _preload_content=False,
                **begin,
            )
        return bytes(answer.data)

    def delete(self, name: str, grace_seconds: float | None = None) -> None:
        """Delete a pod, whose processes then have some time; None means the pod's own.

        Ignores one that doesn't exist.
        """
        options = {} if grace_seconds is None else {"grace_period_seconds": int(grace_seconds)}
        try:
            with _errors():
                self._core.delete_namespaced_pod(
                    name,
                    self._namespace,
                    _request_timeout=_TIMEOUT,
                    _preload_content=False,
                    **options,
                ).release_conn()
        except _Missing:
            return

    def close(self) -> None:
        """Close the connections."""
        self._core.api_client.close()


class _AlreadyExists(InvalidRequest):
    """A pod with this name exists."""


class _Missing(InvalidRequest):
    """There is no such pod or namespace."""


def _api_client(context: str | None) -> client.ApiClient:
    settings, file = client.Configuration(), os.environ.get("KUBECONFIG") or None
    try:
        if context is None and not file and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=settings)
        else:
            config.load_kube_config(file, context=context, client_configuration=settings)
    except (config.ConfigException, OSError, ValueError) as error:
        raise InvalidRequest(
            f"there is no access to a Kubernetes cluster: {str(error)[:200]}",
            remedy="set KUBECONFIG, or run the controller in the cluster with a service account",
        ) from error
    settings.retries = 0
    return client.ApiClient(settings)


@contextmanager
def _errors(pool: str | None = None) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        # The client checks a manifest before it sends it.
        first = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(map(str, first["loc"][1:]))
        raise InvalidRequest(
            f"{pool}: the pod is not valid: {field}: {first['msg']}",
            remedy="check the pool's template",
        ) from error
    except client.ApiException as error:
        raise error_of(error.status or 0, error.body, pool) from error
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise CloudUnavailable(f"the API server doesn't answer: {str(error)[:200]}") from error


def error_of(status: int, body: bytes | str | None, pool: str | None = None) -> FleetError:
    """Convert an answer of the API server, whose body is a ``Status`` if all is well."""
    message, reason = _status(body)
    kind, remedy = _kind(status, reason, message)
    text = message[:300] or f"the API server answers {status}"
    return fleet_error(kind, text, remedies={kind: remedy} if remedy else {}, pool=pool)


def _kind(status: int, reason: str, message: str) -> tuple[type[FleetError], str | None]:
    if status == 403 and "exceeded quota" in message:
        return QuotaExceeded, "raise the namespace's ResourceQuota, or set max_machines"
    if status in (401, 403):
        return CloudDenied, "allow the stack to create, list, and delete pods in the namespace"
    if status == 409 and reason == "AlreadyExists":
        return _AlreadyExists, None
    if status == 404:
        return _Missing, "check the pool's namespace"
    if status in (400, 422):
        return InvalidRequest, "check the pool's template"
    return (Throttled if status == 429 else CloudUnavailable), None


def _status(body: bytes | str | None) -> tuple[str, str]:
    try:
        parsed = json.loads(body or b"")
    except ValueError:
        return "", ""
    if not isinstance(parsed, dict):
        return "", ""
    return str(parsed.get("message") or ""), str(parsed.get("reason") or "")
