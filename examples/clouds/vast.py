#!/usr/bin/env python3
"""Machines of Vast.ai, by its own command line (pip install vastai; vastai set api-key …).

    vast.py list | launch | terminate

VAST_IMAGE: image with vcasgd. VAST_QUERY: what to rent, as for `vastai search offers`. VAST_BID:
USD per hour for spot machines; without it, half more than the lowest bid.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile

QUERY = os.environ.get("VAST_QUERY", "num_gpus=1 rentable=true reliability>0.98")
STATES = {"running": "running", "exited": "gone", "offline": "gone"}


def list_machines(_):
    return {"machines": [row_of(instance) for instance in instances()]}


def row_of(instance):
    status = instance.get("actual_status")
    return {
        "name": instance["label"],
        "id": str(instance["id"]),
        # A spot machine that was outbid is stopped.
        "state": "gone" if status == "stopped" else STATES.get(status, "booting"),
        "launched_at": float(instance.get("start_date") or 0),
        "price_per_hour": float(instance.get("dph_total") or 0),
        "host": str(instance.get("public_ipaddr") or "").strip(),
    }


def launch(request):
    present = {instance["label"] for instance in instances()}
    kind = "--type=bid" if request["spot"] else "--type=on-demand"
    offers = vastai("search", "offers", QUERY, kind, "--order", "dph_total")
    granted = [
        machine["name"]
        for machine in request["machines"]
        if machine["name"] in present or (offers and rent(offers.pop(0), machine, request))
    ]
    if not granted:
        refuse("no_capacity", f"no offer for {QUERY}")
    return {"machines": granted}


def rent(offer, machine, request):
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as script:
        # In a file that only this user can read: a list of processes shows arguments.
        for name, value in request["env"].items():
            script.write(f"export {name}={shlex.quote(value)}\n")
        script.write(shlex.join(machine["command"]) + "\n")
        script.flush()
        arguments = ["--image", os.environ["VAST_IMAGE"], "--label", machine["name"]]
        arguments += ["--disk", "40", "--onstart", script.name]
        if request["spot"]:
            bid = os.environ.get("VAST_BID") or f"{1.5 * offer['min_bid']:.4f}"
            arguments += ["--bid_price", bid]
        return vastai("create", "instance", str(offer["id"]), *arguments).get("success")


def terminate(request):
    for machine in request["machines"]:
        vastai("destroy", "instance", machine["id"], parse=False)
    return {}


def instances():
    return [row for row in vastai("show", "instances") if row.get("label")]


def vastai(*arguments, parse=True):
    done = subprocess.run(["vastai", *arguments, "--raw"], capture_output=True, text=True)
    if done.returncode:
        refuse("unavailable", done.stderr or done.stdout)
    return json.loads(done.stdout) if parse else None


def refuse(error, message):
    print(json.dumps({"error": error, "message": message[-200:]}))
    sys.exit(1)


if __name__ == "__main__":
    command = {"list": list_machines, "launch": launch, "terminate": terminate}[sys.argv[1]]
    print(json.dumps(command(json.load(sys.stdin))))
