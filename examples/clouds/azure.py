#!/usr/bin/env python3
"""Spot machines of Azure, by its own command line (az login, or a managed identity).

    azure.py list | launch | terminate

AZURE_GROUP: resource group. AZURE_IMAGE: image with vcasgd. Types are sizes, such as
Standard_NC4as_T4_v3; zones are those of the group's region, such as "1".
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from datetime import datetime

GROUP = os.environ["AZURE_GROUP"]
STATES = {"VM running": "running", "VM starting": "booting", "VM creating": "booting"}
ERRORS = {
    "no_capacity": ("SkuNotAvailable", "AllocationFailed", "OverconstrainedAllocation"),
    "quota": ("QuotaExceeded", "OperationNotAllowed"),
    "denied": ("AuthorizationFailed", "az login"),
    "throttled": ("TooManyRequests",),
    "invalid": ("InvalidParameter", "InvalidTemplate", "ResourceGroupNotFound"),
}


def list_machines(_):
    return {"machines": [row_of(vm) for vm in az("list", "--show-details")]}


def row_of(vm):
    power = vm.get("powerState") or "VM creating"
    return {
        "name": vm["name"],
        "id": vm["id"][-255:],
        "state": STATES.get(power, "gone"),
        "launched_at": datetime.fromisoformat(vm["timeCreated"]).timestamp(),
        "zone": (vm.get("zones") or [""])[0],
        "machine_type": vm["hardwareProfile"]["vmSize"],
        "host": vm.get("privateIps") or "",
    }


def launch(request):
    present, refusals = {vm["name"] for vm in az("list")}, []
    for machine in request["machines"]:
        if machine["name"] not in present and (refusal := create(machine, request)):
            refusals.append(refusal)
            break
        present.add(machine["name"])
    granted = [each["name"] for each in request["machines"] if each["name"] in present]
    if not granted:
        refuse(*refusals[0])
    return {"machines": granted}


def create(machine, request):
    """Return None, or why no machine can be had."""
    spot = ["--priority", "Spot", "--eviction-policy", "Delete", "--max-price", "-1"]
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as script:
        # In a file that only this user can read: a list of processes shows arguments.
        script.write("#!/bin/sh\n")
        for name, value in request["env"].items():
            script.write(f"export {name}={shlex.quote(value)}\n")
        script.write(f"{shlex.join(machine['command'])}\nshutdown -h now\n")
        script.flush()
        return az(
            *("create", "--name", machine["name"], "--image", os.environ["AZURE_IMAGE"]),
            *("--size", request["machine_types"][0], "--custom-data", script.name),
            *("--public-ip-address", "", "--os-disk-delete-option", "Delete"),
            *("--nic-delete-option", "Delete", "--generate-ssh-keys", "--no-wait"),
            *(spot if request["spot"] else []),
            *(["--zone", request["zones"][0]] if request["zones"] != ["any"] else []),
            refusals=True,
        )


def terminate(request):
    ids = [machine["id"] for machine in request["machines"]]
    az("delete", "--ids", *ids, "--yes", "--no-wait", "--force-deletion", "true", group=False)
    return {}


def az(verb, *arguments, group=True, refusals=False):
    where = ["--resource-group", GROUP] if group else []
    argv = ["az", "vm", verb, *where, *arguments, "--output", "json"]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        known = (name for name, codes in ERRORS.items() if any(one in done.stderr for one in codes))
        refusal = next(known, "unavailable"), done.stderr
        return refusal if refusals else refuse(*refusal)
    return None if refusals else json.loads(done.stdout or "[]")


def refuse(error, message):
    print(json.dumps({"error": error, "message": message[-200:]}))
    sys.exit(1)


if __name__ == "__main__":
    command = {"list": list_machines, "launch": launch, "terminate": terminate}[sys.argv[1]]
    print(json.dumps(command(json.load(sys.stdin))))
