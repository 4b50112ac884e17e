#!/usr/bin/env python3
"""Machines of any cloud that SkyPilot knows, by its own command line (pip install skypilot).

    skypilot.py list | launch | terminate

Each machine is a cluster of one node. SKY_SETUP: shell commands that install vcasgd. Types are
accelerators, such as L4:1, or "machine" for none; zones are places, such as aws/us-east-1, or
"any" for the cheapest one.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile

STATES = {"UP": "running", "INIT": "booting", "PENDING": "booting", "AUTOSTOPPING": "leaving"}


def list_machines(_):
    return {"machines": [row_of(cluster) for cluster in clusters()]}


def row_of(cluster):
    return {
        "name": cluster["name"],
        "state": STATES.get(cluster["status"], "gone"),
        "launched_at": float(cluster.get("launched_at") or 0),
        "zone": "/".join(filter(None, (cluster.get("cloud"), cluster.get("region")))).lower(),
    }


def launch(request):
    present = {cluster["name"] for cluster in clusters()}
    for machine in request["machines"]:
        if machine["name"] not in present:
            create(machine, request)
    # A cluster for which no cloud has room disappears from the list.
    return {"machines": [machine["name"] for machine in request["machines"]]}


def create(machine, request):
    resources = {"use_spot": request["spot"]}
    if request["machine_types"] != ["machine"]:
        resources["accelerators"] = request["machine_types"][0]
    if request["zones"] != ["any"]:
        resources["infra"] = request["zones"][0]
    task = {
        "resources": resources,
        "setup": os.environ.get("SKY_SETUP", "true"),
        "secrets": request["env"],
        "run": shlex.join(machine["command"]),
    }
    # In a file that only this user can read: a list of processes shows arguments.
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(task, file)
        file.flush()
        # It is launched beside, and ends with its command.
        options = ("--async", "--yes", "--down", "--idle-minutes-to-autostop", "1")
        sky("launch", "--cluster", machine["name"], *options, file.name)


def terminate(request):
    known = {cluster["name"] for cluster in clusters()}
    names = [machine["name"] for machine in request["machines"] if machine["name"] in known]
    if names:
        sky("down", "--async", "--yes", *names)
    return {}


def clusters():
    lines = sky("status", "--output", "json").splitlines()
    # Warnings can stand before it.
    while lines and not lines[0].startswith("["):
        lines.pop(0)
    return json.loads("\n".join(lines) or "[]")


def sky(*arguments):
    done = subprocess.run(["sky", *arguments], capture_output=True, text=True)
    if done.returncode:
        refuse("unavailable", done.stderr or done.stdout)
    return done.stdout


def refuse(error, message):
    print(json.dumps({"error": error, "message": message[-200:]}))
    sys.exit(1)


if __name__ == "__main__":
    command = {"list": list_machines, "launch": launch, "terminate": terminate}[sys.argv[1]]
    print(json.dumps(command(json.load(sys.stdin))))
