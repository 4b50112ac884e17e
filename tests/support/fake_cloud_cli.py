"""Stands in for the clouds' command lines ``vastai``, ``az``, and ``sky``, and for REST APIs.

Machines are files in a folder, whose commands run at once. It understands the subcommands, options,
and requests that the examples use, and refuses others. As ``vcasgd``, it notes how it was called.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any


def vastai(argv: list[str]) -> object:
    parser = argparse.ArgumentParser("vastai")
    parser.add_argument("--raw", action="store_true", required=True)
    verbs = parser.add_subparsers(dest="verb", required=True)
    show = verbs.add_parser("show")
    show.add_argument("what", choices=["instances"])
    search = verbs.add_parser("search")
    search.add_argument("what", choices=["offers"])
    search.add_argument("query")
    search.add_argument("--type", choices=["bid", "on-demand"], required=True)
    search.add_argument("--order", required=True)
    create = verbs.add_parser("create")
    create.add_argument("what", choices=["instance"])
    create.add_argument("id", type=int)
    for option in ("--image", "--label", "--onstart"):
        create.add_argument(option, required=True)
    create.add_argument("--disk", type=float)
    create.add_argument("--bid_price", type=float)
    destroy = verbs.add_parser("destroy")
    destroy.add_argument("what", choices=["instance"])
    destroy.add_argument("id", type=int)
    # Global options come after the verb, too.
    given = parser.parse_args(["--raw", *(word for word in argv if word != "--raw")])
    match given.verb:
        case "show":
            return rows()
        case "search":
            count = int(os.environ.get("FAKE_OFFERS", "5"))
            return [{"id": 100 + number, "min_bid": 0.1} for number in range(count)]
        case "create":
            run("sh", given.onstart)
            write(given.label, id=given.id, label=given.label, actual_status="running",
                  start_date=1.7e9, dph_total=given.bid_price or 0.4, public_ipaddr="10.0.0.1",
                  image=given.image)  # fmt: skip
            return {"success": True, "new_contract": given.id}
    for path in folder().glob("*.json"):
        if json.loads(path.read_text())["id"] == given.id:
            path.unlink()
    return f"destroying instance {given.id}"


def az(argv: list[str]) -> object:
    parser = argparse.ArgumentParser("az")
    parser.add_argument("service", choices=["vm"])
    parser.add_argument("verb", choices=["list", "create", "delete"])
    for option in ("resource-group", "output", "name", "image", "size", "custom-data", "priority",
                   "eviction-policy", "max-price", "public-ip-address", "os-disk-delete-option",
                   "nic-delete-option", "zone", "force-deletion"):  # fmt: skip
        parser.add_argument(f"--{option}")
    for option in ("show-details", "generate-ssh-keys", "no-wait", "yes"):
        parser.add_argument(f"--{option}", action="store_true")
    parser.add_argument("--ids", nargs="+", default=[])
    given = parser.parse_args(argv)
    if given.verb == "list":
        return rows()
    if given.verb == "delete":
        for name in given.ids:
            (folder() / f"{name.rpartition('/')[2]}.json").unlink(missing_ok=True)
        return None
    if os.environ.get("FAKE_OFFERS") == "0":
        sys.exit("ERROR: (SkuNotAvailable) The requested size is not available in zone 1.")
    run("sh", given.custom_data)
    write(given.name, name=given.name, id=f"/subscriptions/s/virtualMachines/{given.name}",
          powerState="VM running", timeCreated="2026-01-02T03:04:05.678901+00:00",
          zones=[given.zone], hardwareProfile={"vmSize": given.size}, privateIps="10.0.0.1",
          image=given.image, priority=given.priority)  # fmt: skip
    return None


def sky(argv: list[str]) -> object:
    parser = argparse.ArgumentParser("sky")
    verbs = parser.add_subparsers(dest="verb", required=True)
    status = verbs.add_parser("status")
    status.add_argument("--output", choices=["json"], required=True)
    launch, down = verbs.add_parser("launch"), verbs.add_parser("down")
    for verb in (launch, down):
        verb.add_argument("--async", action="store_true", required=True)
        verb.add_argument("--yes", action="store_true", required=True)
    launch.add_argument("--cluster", required=True)
    launch.add_argument("--down", action="store_true", required=True)
    launch.add_argument("--idle-minutes-to-autostop", type=int, required=True)
    launch.add_argument("task", type=Path)
    down.add_argument("clusters", nargs="+")
    given = parser.parse_args(argv)
    match given.verb:
        case "status":
            sys.stdout.write('W: the server differs (["allowed_clouds"])\n')
            return rows()
        case "launch":
            task = json.loads(given.task.read_text())
            assert task["resources"] == {"use_spot": True, "accelerators": "L4:1", "infra": "1"}
            if os.environ.get("FAKE_OFFERS") != "0":
                run("sh", "-c", f"{task['setup']}; {task['run']}", **task["secrets"])
                write(given.cluster, name=given.cluster, status="UP", launched_at=1700000000,
                      cloud="AWS", region="us-east-1")  # fmt: skip
        case "down":
            for name in given.clusters:
                (folder() / f"{name}.json").unlink()
    sys.stdout.write("Request ID: 1\n")
    return None


def vcasgd(argv: list[str]) -> None:
    note = {"argv": argv, "token": os.environ["VCASGD_TOKEN"]}
    (folder() / f"{argv[-1]}.started").write_text(json.dumps(note))


def ended(argv: list[str]) -> None:
    """Do nothing: the machine ends itself."""


# -- REST ----------------------------------------------------------------------------------------


class RestApi(BaseHTTPRequestHandler):
    """The REST APIs of RunPod, below ``/runpod``, and of Lambda, below ``/lambdacloud``."""

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or "null")
        cloud, _, path = self.path.lstrip("/").partition("/")
        allowed = self.headers["Authorization"] == "Bearer key"
        answer = getattr(self, cloud)(path, body) if allowed else (401, "invalid-api-key")
        status, content = answer
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode() if content is not None else b"")

    do_GET = do_POST = do_DELETE = _answer

    def runpod(self, path: str, body: Any) -> tuple[int, object]:
        match self.command, path.split("/"):
            case "GET", ["pods?includeMachine=true"]:
                return 200, rows()
            case "POST", ["pods"]:
                assert body["gpuTypeIds"] == ["L4:1"]
                assert body["dataCenterIds"] == ["1"]
                assert body["interruptible"] is True
                if os.environ.get("FAKE_OFFERS") == "0":
                    return 500, {"error": "There are no longer any instances available"}
                run(*body["dockerStartCmd"], **body["env"])
                pod = {"id": f"p-{body['name']}", "name": body["name"], "desiredStatus": "RUNNING",
                       "costPerHr": "0.22", "lastStartedAt": "2026-01-02T03:04:05.678Z",
                       "publicIp": "10.0.0.1", "machine": {"dataCenterId": "1"}}  # fmt: skip
                write(body["name"], **pod)
                return 201, pod
            case "DELETE", ["pods", pod]:
                return remove(pod)
        return 404, None

    def lambdacloud(self, path: str, body: Any) -> tuple[int, object]:
        match self.command, path:
            case "GET", "instances":
                return 200, {"data": rows()}
            case "POST", "instance-operations/launch":
                if os.environ.get("FAKE_OFFERS") == "0":
                    code = "instance-operations/launch/insufficient-capacity"
                    return 400, {"error": {"code": code, "message": "Not enough capacity"}}
                assert body["ssh_key_names"] == ["mine"]
                run("sh", "-c", body["user_data"])
                name = body["name"]
                write(name, id=f"p-{name}", name=name, status="active", ip="10.0.0.1",
                      tags=body["tags"], region={"name": body["region_name"]},
                      instance_type={"name": body["instance_type_name"],
                                     "price_cents_per_hour": 129})  # fmt: skip
                return 200, {"data": {"instance_ids": [f"p-{name}"]}}
            case "POST", "instance-operations/terminate":
                for instance in body["instance_ids"]:
                    remove(instance)
                return 200, {"data": {}}
        return 404, None


@contextmanager
def rest_api() -> Iterator[str]:
    """Serve :class:`RestApi`, and return its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), RestApi)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# -- machines ------------------------------------------------------------------------------------


def folder() -> Path:
    return Path(os.environ["FAKE_CLOUD"])


def rows() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder().glob("*.json"))]


def write(machine: str, /, **row: object) -> None:
    (folder() / f"{machine}.json").write_text(json.dumps(row))


def remove(machine: str) -> tuple[int, None]:
    path = folder() / f"{machine.removeprefix('p-')}.json"
    if not path.exists():
        return 404, None
    path.unlink()
    return 204, None


def run(*argv: str, **variables: str) -> None:
    """Run a machine's command, which finds no programs but these."""
    fakes = str(folder().parent / "bin")
    programs = {"sh": "/bin/sh"}
    subprocess.run(
        [programs.get(argv[0], argv[0]), *argv[1:]],
        env={"PATH": fakes, "FAKE_CLOUD": str(folder()), **variables},
        check=True,
    )


PROGRAMS = {
    "vastai": vastai, "az": az, "sky": sky,
    "vcasgd": vcasgd, "shutdown": ended, "runpodctl": ended,
}  # fmt: skip

if __name__ == "__main__":
    answer = PROGRAMS[Path(sys.argv[0]).name](sys.argv[1:])
    sys.stdout.write("" if answer is None else json.dumps(answer))
