"""Stands in for the command lines ``vastai`` and ``az``: machines are files in a folder.

It understands the subcommands and options that the examples use, and refuses others.
"""

import argparse
import json
import os
import sys
from pathlib import Path

FOLDER = Path(os.environ["FAKE_CLOUD"])


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
            return [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
        case "search":
            count = int(os.environ.get("FAKE_OFFERS", "5"))
            return [{"id": 100 + number, "min_bid": 0.1} for number in range(count)]
        case "create":
            write(given.label, id=given.id, label=given.label, actual_status="running",
                  start_date=1.7e9, dph_total=given.bid_price or 0.4, public_ipaddr="10.0.0.1",
                  script=Path(given.onstart).read_text(), image=given.image)  # fmt: skip
            return {"success": True, "new_contract": given.id}
    for path in FOLDER.glob("*.json"):
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
        return [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
    if given.verb == "delete":
        for name in given.ids:
            (FOLDER / f"{name.rpartition('/')[2]}.json").unlink(missing_ok=True)
        return None
    if os.environ.get("FAKE_OFFERS") == "0":
        sys.exit("ERROR: (SkuNotAvailable) The requested size is not available in zone 1.")
    write(given.name, name=given.name, id=f"/subscriptions/s/virtualMachines/{given.name}",
          powerState="VM running", timeCreated="2026-01-02T03:04:05.678901+00:00",
          zones=[given.zone], hardwareProfile={"vmSize": given.size}, privateIps="10.0.0.1",
          script=Path(given.custom_data).read_text(), image=given.image,
          priority=given.priority)  # fmt: skip
    return None


def write(machine: str, **row: object) -> None:
    (FOLDER / f"{machine}.json").write_text(json.dumps(row))


if __name__ == "__main__":
    answer = {"vastai": vastai, "az": az}[Path(sys.argv[0]).name](sys.argv[1:])
    sys.stdout.write("" if answer is None else json.dumps(answer))
