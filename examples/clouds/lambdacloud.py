#!/usr/bin/env python3
"""Machines of Lambda, by its REST API. It sells no spot machines: set spot: false for the pool.

    lambdacloud.py list | launch | terminate

LAMBDA_API_KEY: a key of the account. LAMBDA_SSH_KEY: name of an SSH key there. LAMBDA_SETUP: shell
commands that install vcasgd. Types are such as gpu_1x_a10, and zones regions, such as us-east-1;
name both. Instances don't end by themselves, but the stack terminates them when they leave.
"""

import json
import os
import shlex
import sys
import time
import urllib.error
import urllib.request

API = os.environ.get("LAMBDA_API", "https://cloud.lambda.ai/api/v1")
STATES = {"active": "running", "booting": "booting"}
ERRORS = {
    "no_capacity": ("insufficient-capacity",),
    "quota": ("quota-exceeded",),
    "denied": ("invalid-api-key", "account-inactive", "forbidden"),
    "throttled": ("rate-limit", "too-many-requests"),
    "invalid": ("invalid-parameters", "object-does-not-exist", "invalid-address"),
}


def list_machines(_):
    return {"machines": [row_of(each) for each in instances()]}


def row_of(instance):
    tags = {tag["key"]: tag["value"] for tag in instance.get("tags") or ()}
    kind = instance.get("instance_type") or {}
    return {
        "name": instance["name"],
        "id": instance["id"],
        "state": STATES.get(instance["status"], "gone"),
        "launched_at": float(tags.get("launched-at", 0)),
        "price_per_hour": kind.get("price_cents_per_hour", 0) / 100,
        "zone": (instance.get("region") or {}).get("name", ""),
        "machine_type": kind.get("name", ""),
        "host": instance.get("ip") or "",
    }


def launch(request):
    if request["spot"]:
        refuse("invalid", "Lambda sells no spot machines: set spot: false for the pool")
    present = {instance["name"] for instance in instances()}
    new = [each for each in request["machines"] if each["name"] not in present]
    granted = [each["name"] for each in request["machines"] if each["name"] in present]
    # Lambda accepts one launch in 12 seconds; the stack asks for others in a later round.
    for machine in new[:1]:
        if refusal := create(machine, request):
            if not granted:
                refuse(*refusal)
        else:
            granted.append(machine["name"])
    return {"machines": granted}


def create(machine, request):
    """Return None, or why no instance can be had."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in request["env"].items()]
    setup, command = os.environ.get("LAMBDA_SETUP", "true"), shlex.join(machine["command"])
    instance = {
        "name": machine["name"],
        "region_name": request["zones"][0],
        "instance_type_name": request["machine_types"][0],
        "ssh_key_names": [os.environ["LAMBDA_SSH_KEY"]],
        "tags": [{"key": "launched-at", "value": str(int(time.time()))}],
        "user_data": "\n".join(["#!/bin/sh", *exports, setup, command, ""]),
    }
    return call("POST", "/instance-operations/launch", instance, refusals=True)


def terminate(request):
    known = {instance["id"] for instance in instances()}
    ids = [machine["id"] for machine in request["machines"] if machine["id"] in known]
    if ids:
        call("POST", "/instance-operations/terminate", {"instance_ids": ids})
    return {}


def instances():
    ended = ("terminated", "terminating")
    rows = call("GET", "/instances")["data"]
    return [row for row in rows if row.get("name") and row["status"] not in ended]


def call(method, path, body=None, refusals=False):
    headers = {
        "Authorization": f"Bearer {os.environ['LAMBDA_API_KEY']}",
        "Content-Type": "application/json",
        "User-Agent": "vcasgd",
    }
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(API + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        message = error.read().decode(errors="replace")
        known = (name for name, codes in ERRORS.items() if any(one in message for one in codes))
        refusal = next(known, "unavailable"), message
        return refusal if refusals else refuse(*refusal)
    except OSError as error:
        refuse("unavailable", str(error))
    return None if refusals else found


def refuse(error, message):
    print(json.dumps({"error": error, "message": message[-200:]}))
    sys.exit(1)


if __name__ == "__main__":
    command = {"list": list_machines, "launch": launch, "terminate": terminate}[sys.argv[1]]
    print(json.dumps(command(json.load(sys.stdin))))
