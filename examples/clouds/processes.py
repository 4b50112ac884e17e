#!/usr/bin/env python3
"""Machines that are processes of this computer: a reference for commands of a pool.

    processes.py list | launch | terminate

See docs/how-to/any-cloud.md. CLOUD_FOLDER has a file for each machine.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

FOLDER = Path(os.environ["CLOUD_FOLDER"])


def list_machines(_):
    return {"machines": [row for row in rows() if row["name"].startswith("join-")]}


def launch(request):
    limit = int(os.environ.get("CLOUD_LIMIT", "100"))
    running = sum(row["state"] == "running" for row in rows())
    for machine in request["machines"]:
        path = FOLDER / machine["name"]
        # A launch that is repeated finds the machines of the first one.
        if not path.exists() and running < limit:
            path.write_text(json.dumps(start(machine, request)))
            running += 1
    names = [machine["name"] for machine in request["machines"]]
    granted = [name for name in names if (FOLDER / name).exists()]
    if not granted:
        refuse("no_capacity", f"{limit} machines run")
    return {"machines": granted}


def start(machine, request):
    with (FOLDER / f"{machine['name']}.log").open("w") as log:
        process = subprocess.Popen(
            machine["command"],
            env={**os.environ, **request["env"]},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return {"pid": process.pid, "launched_at": time.time(), "zone": request["zones"][0]}


def terminate(request):
    for machine in request["machines"]:
        stored = json.loads((FOLDER / machine["name"]).read_text())
        with suppress(ProcessLookupError):
            os.killpg(stored["pid"], signal.SIGKILL)
    return {}


def rows():
    for path in FOLDER.glob("join-*"):
        if not path.suffix:
            yield row_of(path.name, json.loads(path.read_text()))


def row_of(name, stored):
    status = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(stored["pid"])], capture_output=True, text=True
    ).stdout.strip()
    runs = status != "" and not status.startswith("Z")
    return {
        "name": name,
        "state": "running" if runs else "gone",
        "launched_at": stored["launched_at"],
        "zone": stored["zone"],
        "host": "localhost",
    }


def refuse(error, message):
    print(json.dumps({"error": error, "message": message}))
    sys.exit(1)


if __name__ == "__main__":
    command = {"list": list_machines, "launch": launch, "terminate": terminate}[sys.argv[1]]
    print(json.dumps(command(json.load(sys.stdin))))
