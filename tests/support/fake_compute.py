"""In-memory Compute Engine over real HTTP: the part of its REST API that the provider uses.

There is no emulator of Compute Engine. This module follows the reference
(https://cloud.google.com/compute/docs/reference/rest/v1): names are unique in a zone, a
``requestId`` identifies repeated requests, clients wait for an operation until it is done, an
instance's properties are those of its template patched by those of the request (RFC 7396), and
listings have filters and pages.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from support.cloud_rules import google_refusals
from support.http_servers import LocalServer, QuietHandler

API = "https://www.googleapis.com/compute/v1"
#: Longest time in seconds that a wait blocks, as documented.
WAIT_LIMIT_SECONDS = 120.0


class Refused(Exception):
    def __init__(self, status: int, reason: str, message: str = "refused by the test") -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


@dataclass
class Operation:
    name: str
    zone: str
    request: str
    done_at: float
    error: tuple[str, str, int] | None
    status: str = "RUNNING"

    def document(self, project: str) -> dict[str, Any]:
        where = f"{API}/projects/{project}/zones/{self.zone}"
        row: dict[str, Any] = {
            "kind": "compute#operation",
            "name": self.name,
            "zone": where,
            "clientOperationId": self.request,
            "status": self.status,
            "selfLink": f"{where}/operations/{self.name}",
        }
        if self.status == "DONE" and self.error is not None:
            code, message, status = self.error
            row |= {
                "error": {"errors": [{"code": code, "message": message}]},
                "httpErrorStatusCode": status,
            }
        return row


@dataclass
class FakeCompute:
    """State of the server; tests read and change it under :attr:`lock`."""

    project: str = "project"
    operation_seconds: float = 0.02
    #: Zones without capacity, and the number of machines that the others have.
    exhausted: dict[str, str] = field(default_factory=dict)
    room: dict[str, int] = field(default_factory=dict)
    #: Refusals by path pattern; each is returned once, in order, and nothing else happens.
    refusals: list[tuple[str, Refused]] = field(default_factory=list)
    templates: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Attributes that machines wrote about themselves, by name and path.
    attributes: dict[tuple[str, str], str] = field(default_factory=dict)
    instances: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    operations: dict[str, Operation] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    #: Permissions of the caller, and limit and usage by metric.
    granted: set[str] = field(default_factory=set)
    quotas: dict[str, dict[str, float]] = field(default_factory=dict)
    #: Rows of the price catalog, two on a page.
    skus: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    changed: threading.Condition = field(init=False)

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self.lock)

    def refuse(self, path: str, status: int, reason: str) -> None:
        """Refuse the next request whose path matches, once."""
        with self.lock:
            self.refusals.append((path, Refused(status, reason)))

    def alive(self) -> list[dict[str, Any]]:
        with self.lock:
            return list(self.instances.values())

    def remove(self, name: str) -> None:
        """Remove a machine, as after a preemption or its own shutdown."""
        with self.lock:
            self.instances = {k: row for k, row in self.instances.items() if row["name"] != name}

    # -- methods of the API ----------------------------------------------------------------------

    def region(self, name: str) -> dict[str, Any]:
        rows = [{"metric": metric, **row} for metric, row in self.quotas.items()]
        return {"name": name, "quotas": rows}

    def bulk_insert(self, zone: str, request: str, body: dict[str, Any]) -> Operation:
        if known := next((o for o in self.operations.values() if o.request == request), None):
            return known
        names = list(body["perInstanceProperties"])
        if refused := list(google_refusals(request, body)):
            raise Refused(400, "invalid", f"Invalid value: {refused}")
        assert int(body["count"]) == len(names)
        for name in names:
            if (zone, name) in self.instances:
                raise Refused(409, "alreadyExists", f"{name} already exists")
        room = min(len(names), self.room.get(zone, len(names)))
        error = self._shortage(zone, room, int(body.get("minCount", len(names))))
        for name in names[:room] if error is None else ():
            self.instances[zone, name] = self._instance(zone, name, body)
            if zone in self.room:
                self.room[zone] -= 1
        return self._operation(zone, request, error)

    def delete(self, zone: str, name: str, request: str) -> Operation:
        if (zone, name) not in self.instances:
            raise Refused(404, "notFound", f"{name} was not found")
        self.instances[zone, name]["status"] = "STOPPING"
        operation = self._operation(zone, request, None)
        timer = threading.Timer(self.operation_seconds, self.remove, [name])
        timer.daemon = True
        timer.start()
        return operation

    def simulate_maintenance(self, zone: str, name: str, request: str) -> Operation:
        if (zone, name) not in self.instances:
            raise Refused(404, "notFound", f"{name} was not found")
        self.instances[zone, name]["status"] = "STOPPING"
        return self._operation(zone, request, None)

    def catalog(self, page: str) -> dict[str, Any]:
        start = int(page or 0)
        more = str(start + 2) if start + 2 < len(self.skus) else ""
        return {"skus": self.skus[start : start + 2], "nextPageToken": more}

    def guest_attributes(self, zone: str, name: str, path: str) -> dict[str, Any]:
        if (zone, name) not in self.instances or (name, path) not in self.attributes:
            raise Refused(404, "notFound", f"{name} has no {path}")
        namespace, _, key = path.partition("/")
        item = {"namespace": namespace, "key": key, "value": self.attributes[name, path]}
        return {
            "kind": "compute#guestAttributes",
            "queryPath": path,
            "queryValue": {"items": [item]},
        }

    def aggregated(self, query: dict[str, str]) -> dict[str, Any]:
        rows = [row for row in self.instances.values() if _passes(row, query.get("filter", ""))]
        rows.sort(key=lambda row: row["name"])
        start, size = int(query.get("pageToken", "0")), int(query.get("maxResults", "500"))
        page: dict[str, Any] = {}
        for row in rows[start : start + size]:
            scope = f"zones/{row['zone'].rpartition('/')[2]}"
            page.setdefault(scope, {"instances": []})["instances"].append(row)
        more = {"nextPageToken": str(start + size)} if start + size < len(rows) else {}
        return {"kind": "compute#instanceAggregatedList", "items": page, **more}

    def wait(self, name: str) -> Operation:
        operation = self.operations[name]
        deadline = time.monotonic() + WAIT_LIMIT_SECONDS
        while operation.status != "DONE" and (left := operation.done_at - time.monotonic()) > 0:
            self.changed.wait(min(left, deadline - time.monotonic()))
        operation.status = "DONE"
        return operation

    def _shortage(self, zone: str, room: int, minimum: int) -> tuple[str, str, int] | None:
        code = self.exhausted.get(zone)
        if code is None and room < minimum:
            code = "ZONE_RESOURCE_POOL_EXHAUSTED"
        if code is None:
            return None
        return code, f"The zone '{zone}' does not have enough resources available.", 503

    def _operation(self, zone: str, request: str, error: Any) -> Operation:
        name = f"operation-{len(self.operations)}"
        done_at = time.monotonic() + self.operation_seconds
        self.operations[name] = Operation(name, zone, request or name, done_at, error)
        return self.operations[name]

    def _instance(self, zone: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        template = body["sourceInstanceTemplate"].partition(f"projects/{self.project}/")[2]
        if template not in self.templates:
            raise Refused(404, "notFound", f"{template} was not found")
        row = _patched(self.templates[template], body.get("instanceProperties", {}))
        where = f"{API}/projects/{self.project}/zones/{zone}"
        return {
            **row,
            "kind": "compute#instance",
            "name": name,
            "zone": where,
            "machineType": f"{where}/machineTypes/{row['machineType']}",
            "status": "RUNNING",
            "creationTimestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "networkInterfaces": [
                {**each, "networkIP": "10.0.0.1"} for each in row.get("networkInterfaces", [{}])
            ],
        }


def _patched(target: Any, patch: Any) -> Any:
    """Apply a merge patch (RFC 7396) without null values."""
    if not isinstance(patch, dict) or not isinstance(target, dict):
        return patch
    return {**target, **{key: _patched(target.get(key), value) for key, value in patch.items()}}


def _passes(row: dict[str, Any], expression: str) -> bool:
    if not expression:
        return True
    parts = re.fullmatch(r'\([\w.-]+ = "[^"]*"\)( AND \([\w.-]+ = "[^"]*"\))*', expression)
    if parts is None:
        raise Refused(400, "invalid", f"Invalid value for field 'filter': {expression}")
    for name, value in re.findall(r'\(([\w.-]+) = "([^"]*)"\)', expression):
        found = row["labels"].get(name[7:]) if name.startswith("labels.") else row.get(name)
        if found != value:
            return False
    return True


class ComputeServer(LocalServer):
    """Server of a project."""

    def __init__(self, compute: FakeCompute) -> None:
        super().__init__(_Handler)
        self.compute = compute


class _Handler(QuietHandler):
    server: ComputeServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(
            {
                r"aggregated/instances": lambda compute: compute.aggregated(self.query),
                r"zones/([\w-]+)/instances/([\w-]+)/getGuestAttributes": (
                    lambda compute, zone, name: compute.guest_attributes(
                        zone, name, self.query["queryPath"]
                    )
                ),
                r"(global|regions/[\w-]+)/instanceTemplates/[\w-]+": self._template,
                r"regions/([\w-]+)": lambda compute, region: compute.region(region),
                r"/v1/services/6F81-5844-456A/skus": lambda compute: compute.catalog(
                    self.query.get("pageToken", "")
                ),
            }
        )

    def do_POST(self) -> None:
        self._answer(
            {
                r"zones/([\w-]+)/instances/bulkInsert": lambda compute, zone: self._shown(
                    compute.bulk_insert(zone, self.query["requestId"], self.request_body)
                ),
                r"zones/([\w-]+)/instances/([\w-]+)/simulateMaintenanceEvent": (
                    lambda compute, zone, name: self._shown(
                        compute.simulate_maintenance(zone, name, "")
                    )
                ),
                r"/v1/projects/[\w-]+:testIamPermissions": lambda compute: {
                    "permissions": sorted(compute.granted & set(self.request_body["permissions"]))
                },
                r"zones/[\w-]+/operations/([\w-]+)/wait": lambda compute, name: self._shown(
                    compute.wait(name)
                ),
            }
        )

    def do_DELETE(self) -> None:
        self._answer(
            {
                r"zones/([\w-]+)/instances/([\w-]+)": lambda compute, zone, name: self._shown(
                    compute.delete(zone, name, "")
                )
            }
        )

    def _answer(self, routes: dict[str, Callable[..., dict[str, Any]]]) -> None:
        parts = urlsplit(self.path)
        self.query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        self.request_body = json.loads(self.body() or b"{}")
        compute = self.server.compute
        path = unquote(parts.path).removeprefix(f"/compute/v1/projects/{compute.project}/")
        try:
            with compute.lock:
                compute.requests.append((self.command, path))
                self._refuse(compute, path)
                self._send(HTTPStatus.OK, self._route(routes, path))
        except Refused as refused:
            row = {"reason": refused.reason, "message": str(refused)}
            error = {"code": refused.status, "message": str(refused), "errors": [row]}
            self._send(refused.status, {"error": error})

    def _refuse(self, compute: FakeCompute, path: str) -> None:
        for index, (pattern, refused) in enumerate(compute.refusals):
            if re.search(pattern, path):
                del compute.refusals[index]
                raise refused

    def _route(self, routes: dict[str, Callable[..., dict[str, Any]]], path: str) -> dict[str, Any]:
        for pattern, route in routes.items():
            if match := re.fullmatch(pattern, path):
                self.match = match
                groups = () if route == self._template else match.groups()
                return route(self.server.compute, *groups)
        raise Refused(404, "notFound", f"there is no {self.command} {path}")

    def _template(self, compute: FakeCompute) -> dict[str, Any]:
        path = self.match[0]
        if path not in compute.templates:
            raise Refused(404, "notFound", f"{path} was not found")
        return {"name": path.rpartition("/")[2], "properties": compute.templates[path]}

    def _shown(self, operation: Operation) -> dict[str, Any]:
        return operation.document(self.server.compute.project)

    def _send(self, status: int, document: dict[str, Any]) -> None:
        self.answer(status, json.dumps(document), Content_Type="application/json")
