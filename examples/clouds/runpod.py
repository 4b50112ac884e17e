#!/usr/bin/env python3
"""Machines of RunPod, by its REST API.

    runpod.py list | launch | terminate

RUNPOD_API_KEY: a key that may create pods. RUNPOD_IMAGE: image with vcasgd. Types are IDs of GPUs,
such as "NVIDIA GeForce RTX 4090"; zones are data centers, such as EU-RO-1.
"""

import json
import os
import shlex
import sys
import urllib.error
import urllib.request
from datetime import datetime

API = os.environ.get("RUNPOD_API", "https://rest.runpod.io/v1")
#: Any other status is unavailable.
ERRORS = {400: "invalid", 401: "denied", 402: "quota", 403: "denied", 429: "throttled"}
NO_CAPACITY = ("no longer any instances", "no instances", "does not have the resources")


def list_machines(_):
    return {"machines": [row_of(pod) for pod in pods()]}


def row_of(pod):
    machine, started = pod.get("machine") or {}, pod.get("lastStartedAt")
    return {
        "name": pod["name"],
        "id": pod["id"],
        # A spot pod that was outbid is stopped.
        "state": {"RUNNING": "running"}.get(pod["desiredStatus"], "gone"),
        "launched_at": datetime.fromisoformat(started).timestamp() if started else 0.0,
        "price_per_hour": float(pod.get("costPerHr") or 0),
        "zone": machine.get("dataCenterId") or "",
        "machine_type": machine.get("gpuTypeId") or "",
        "host": pod.get("publicIp") or "",
    }


def launch(request):
    present, refusal = {pod["name"] for pod in pods()}, None
    for machine in request["machines"]:
        if machine["name"] not in present and (refusal := create(machine, request)):
            break
        present.add(machine["name"])
    granted = [each["name"] for each in request["machines"] if each["name"] in present]
    if not granted:
        refuse(*refusal)
    return {"machines": granted}


def create(machine, request):
    """Return None, or why no pod can be had."""
    # RunPod starts the command of a pod again when it ends.
    ends = 'runpodctl remove pod "$RUNPOD_POD_ID"'
    pod = {
        "name": machine["name"],
        "imageName": os.environ["RUNPOD_IMAGE"],
        "gpuTypeIds": request["machine_types"],
        "interruptible": request["spot"],
        "containerDiskInGb": 40,
        "volumeInGb": 0,
        "env": request["env"],
        "dockerStartCmd": ["sh", "-c", f"{shlex.join(machine['command'])}; {ends}"],
    }
    if request["zones"] != ["any"]:
        pod["dataCenterIds"] = request["zones"]
    return call("POST", "/pods", pod, refusals=True)


def terminate(request):
    for machine in request["machines"]:
        call("DELETE", f"/pods/{machine['id']}", gone=404)
    return {}


def pods():
    return call("GET", "/pods?includeMachine=true")


def call(method, path, body=None, refusals=False, gone=None):
    headers = {
        "Authorization": f"Bearer {os.environ['RUNPOD_API_KEY']}",
        "Content-Type": "application/json",
        "User-Agent": "vcasgd",
    }
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(API + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            text = answer.read()
    except urllib.error.HTTPError as error:
        if error.code == gone:
            return None
        message = error.read().decode(errors="replace")
        full = any(words in message.lower() for words in NO_CAPACITY)
        refusal = "no_capacity" if full else ERRORS.get(error.code, "unavailable"), message
        return refusal if refusals else refuse(*refusal)
    except OSError as error:
        refuse("unavailable", str(error))
    return None if refusals or not text else json.loads(text)


def refuse(error, message):
    print(json.dumps({"error": error, "message": message[-200:]}))
    sys.exit(1)


if __name__ == "__main__":
    command = {"list": list_machines, "launch": launch, "terminate": terminate}[sys.argv[1]]
    print(json.dumps(command(json.load(sys.stdin))))
