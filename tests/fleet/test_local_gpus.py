"""GPUs of this computer: what the management library reports, and the local pool made of it.

The library is a fake one, in a process of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support.gpus import on_gpus

CARDS = [
    {"uuid": "GPU-a", "name": "Card A", "total": 80, "free": 60, "utilization": 97},
    {"uuid": "GPU-b", "name": "Card B", "total": 40, "free": 40},
    {"uuid": "GPU-c", "name": "Card C", "total": 40, "free": 10, "utilization": 0},
]
#: Prints the GPUs and the first pool for each set of variables.
SHOW = """
import json, os
from dataclasses import asdict
from vcasgd.fleet.providers.registry import configured_pools, make_providers
from vcasgd.gpus import visible_gpus
from vcasgd.settings import load_settings

def pool():
    settings = load_settings()
    (pool,) = configured_pools(settings)
    (provider,) = make_providers(settings, [pool]).values()
    (offer,) = provider.offers(pool.name)
    return [provider.capacity(pool.name), offer.cpus, offer.gpus, provider.devices]

before, shown = dict(os.environ), []
for variables in json.loads(os.environ["CASES"]):
    os.environ.clear()
    os.environ.update({**before, **variables})
    shown.append([[asdict(gpu) for gpu in visible_gpus()], pool()])
print(json.dumps(shown))
"""
ALL = ["GPU-a", "GPU-b", "GPU-c"]
#: Variables, the GPUs that a process sees, and the pool's machines and GPUs.
CASES: list[tuple[dict[str, str], list[str], int, list[str]]] = [
    ({}, ALL, 3, ALL),
    ({"CUDA_VISIBLE_DEVICES": "2,0"}, ["GPU-c", "GPU-a"], 2, ["GPU-c", "GPU-a"]),
    ({"CUDA_VISIBLE_DEVICES": "GPU-b, 0"}, ["GPU-b", "GPU-a"], 2, ["GPU-b", "GPU-a"]),
    # CUDA, too, ignores what follows an entry that is no GPU.
    ({"CUDA_VISIBLE_DEVICES": "0,7,1"}, ["GPU-a"], 1, ["GPU-a"]),
    ({"VCASGD_LOCAL_GPUS": "2"}, ALL, 2, ["GPU-a", "GPU-b"]),
    ({"VCASGD_LOCAL_CAPACITY": "6"}, ALL, 6, ALL),
    ({"VCASGD_LOCAL_GPUS": "1", "VCASGD_LOCAL_CAPACITY": "2"}, ALL, 2, ["GPU-a"]),
]


def show(home: Path, cards: list[dict[str, Any]] | None, cases: Iterable[dict[str, str]]) -> Any:
    return on_gpus(home, SHOW, cards, CASES=json.dumps([*cases]))


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    variables = [case for case, *_ in CASES]
    found = show(tmp_path_factory.mktemp("gpus"), CARDS, variables)
    return dict(zip(map(str, variables), found, strict=True))


@pytest.mark.parametrize(("variables", "visible", "capacity", "devices"), CASES)
def test_the_local_pool_has_a_machine_for_each_visible_gpu(
    shown: dict[str, Any],
    variables: dict[str, str],
    visible: list[str],
    capacity: int,
    devices: list[str],
) -> None:
    gpus, (found_capacity, _cpus, gpus_of_machine, found_devices) = shown[str(variables)]
    assert [gpu["uuid"] for gpu in gpus] == visible
    assert (found_capacity, gpus_of_machine, found_devices) == (capacity, 1, devices)


def test_gpus_are_reported(shown: dict[str, Any]) -> None:
    gpus, _ = shown["{}"]
    assert [(gpu["name"], gpu["utilization"]) for gpu in gpus] == [
        ("Card A", 97.0), ("Card B", None), ("Card C", 0.0),
    ]  # fmt: skip
    assert (gpus[0]["memory_bytes"], gpus[0]["memory_free_bytes"]) == (80, 60)


@pytest.mark.parametrize(
    ("cards", "variables", "visible"),
    [
        (None, {}, 0),
        ([], {}, 0),
        (CARDS, {"CUDA_VISIBLE_DEVICES": ""}, 0),
        (CARDS, {"VCASGD_LOCAL_GPUS": "0"}, 3),
    ],
)
def test_a_computer_without_gpus(
    cards: list[dict[str, Any]] | None, variables: dict[str, str], visible: int, tmp_path: Path
) -> None:
    ((gpus, (capacity, cpus, gpus_of_machine, devices)),) = show(tmp_path, cards, [variables])
    assert len(gpus) == visible
    assert (capacity >= 3, cpus, gpus_of_machine, devices) == (True, 1.0, 0, [])


def test_a_pools_file_says_how_many_gpus_its_machines_have(tmp_path: Path) -> None:
    file = tmp_path / "pools.yaml"
    pool = {"name": "fast", "provider": "local", "max_machines": 1, "gpus": 2}
    file.write_text(json.dumps({"pools": [pool]}))
    ((_, found),) = show(tmp_path, CARDS, [{"VCASGD_POOLS": str(file)}])
    assert found == [1, 1.0, 2, ALL]
