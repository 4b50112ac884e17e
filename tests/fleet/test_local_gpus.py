"""GPUs of this computer: what the management library reports, and the local pool made of it.

The library is a fake one, in a process of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.gpus import on_gpus

CARDS = [
    {"uuid": "GPU-a", "name": "Card A", "total": 80, "free": 60, "utilization": 97},
    {"uuid": "GPU-b", "name": "Card B", "total": 40, "free": 40},
    {"uuid": "GPU-c", "name": "Card C", "total": 40, "free": 10, "utilization": 0},
]
SEEN = """
import json
from dataclasses import asdict
from vcasgd.gpus import visible_gpus

print(json.dumps([asdict(gpu) for gpu in visible_gpus()]))
"""
POOL = """
import json
from vcasgd.fleet.providers.registry import configured_pools, make_providers
from vcasgd.settings import load_settings

settings = load_settings()
pools = configured_pools(settings)
(provider,) = make_providers(settings, pools).values()
(offer,) = provider.offers(pools[0].name)
print(json.dumps([provider.capacity(pools[0].name), offer.cpus, offer.gpus, provider.devices]))
"""


@pytest.mark.parametrize("cards", [None, []])
def test_a_computer_without_gpus(cards: list[dict[str, Any]] | None, tmp_path: Path) -> None:
    assert on_gpus(tmp_path, SEEN, cards) == []
    capacity, cpus, gpus, devices = on_gpus(tmp_path, POOL, cards)
    assert (capacity >= 3, cpus, gpus, devices) == (True, 1.0, 0, [])


def test_gpus_are_reported(tmp_path: Path) -> None:
    found = on_gpus(tmp_path, SEEN, CARDS)
    assert [(gpu["uuid"], gpu["name"], gpu["utilization"]) for gpu in found] == [
        ("GPU-a", "Card A", 97.0),
        ("GPU-b", "Card B", None),
        ("GPU-c", "Card C", 0.0),
    ]
    assert (found[0]["memory_bytes"], found[0]["memory_free_bytes"]) == (80, 60)


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("2,0", ["GPU-c", "GPU-a"]),
        ("GPU-b, 0", ["GPU-b", "GPU-a"]),
        # CUDA, too, ignores what follows an entry that is no GPU.
        ("0,7,1", ["GPU-a"]),
        ("", []),
    ],
)
def test_only_visible_gpus_are_used(listed: str, expected: list[str], tmp_path: Path) -> None:
    found = on_gpus(tmp_path, SEEN, CARDS, CUDA_VISIBLE_DEVICES=listed)
    assert [gpu["uuid"] for gpu in found] == expected


@pytest.mark.parametrize(
    ("variables", "capacity", "devices"),
    [
        ({}, 3, ["GPU-a", "GPU-b", "GPU-c"]),
        ({"VCASGD_LOCAL_GPUS": "2"}, 2, ["GPU-a", "GPU-b"]),
        ({"VCASGD_LOCAL_CAPACITY": "6"}, 6, ["GPU-a", "GPU-b", "GPU-c"]),
        ({"VCASGD_LOCAL_GPUS": "1", "VCASGD_LOCAL_CAPACITY": "2"}, 2, ["GPU-a"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 1, ["GPU-b"]),
    ],
)
def test_the_local_pool_has_a_machine_for_each_gpu(
    variables: dict[str, str], capacity: int, devices: list[str], tmp_path: Path
) -> None:
    found_capacity, _cpus, gpus, found_devices = on_gpus(tmp_path, POOL, CARDS, **variables)
    assert (found_capacity, gpus, found_devices) == (capacity, 1, devices)


def test_the_setting_turns_gpus_off(tmp_path: Path) -> None:
    off = on_gpus(tmp_path, POOL, CARDS, VCASGD_LOCAL_GPUS="0")
    assert off == on_gpus(tmp_path, POOL, None)


def test_a_pools_file_says_how_many_gpus_its_machines_have(tmp_path: Path) -> None:
    file = tmp_path / "pools.yaml"
    pool = {"name": "fast", "provider": "local", "max_machines": 1, "gpus": 2}
    file.write_text(json.dumps({"pools": [pool]}))
    found = on_gpus(tmp_path, POOL, CARDS, VCASGD_POOLS=str(file))
    assert found == [1, 1.0, 2, ["GPU-a", "GPU-b", "GPU-c"]]
