"""Exchange of one large vector over two store nodes."""

from __future__ import annotations

import sys
import time

import psutil
import pytest

from benchmarks.measure.rig import BenchWorkload, Rig
from vcasgd.settings import separate_settings

GIB = 1 << 30
#: Vectors that all processes together need: tensors servers 3, parameter servers 2, worker 2.
VECTORS = 8


@pytest.mark.extended
@pytest.mark.parametrize("size", [GIB // 2, 4 * GIB])
def test_updates_of_a_large_vector_are_applied_on_two_nodes(size: int) -> None:
    available = psutil.virtual_memory().available
    if available < VECTORS * size:
        pytest.skip(
            f"needs {VECTORS * size / 1e9:.0f} GB of free memory, {available / 1e9:.0f} GB are free"
        )
    workload = BenchWorkload(size // 4, workers=1, codec="float32", nodes=2, fresh=True)
    with Rig(workload, separate_settings()) as rig:
        rig.start()
        (tally,) = rig.tallies.values()
        began = time.monotonic()
        rig.await_truth(lambda: tally.applied >= 6, 600, "three updates in both shards")
        seconds = time.monotonic() - began
        versions = [snapshot.meta.version for snapshot in rig.snapshots()]
        facts = rig.server_facts()

    line = (
        f"{size / 1e9:.1f} GB: 3 updates in {seconds:.1f} s, {facts['tensors_peak_mb']} MB a node"
    )
    sys.stdout.write(f"{line}\n")
    assert min(versions) >= 3
    assert facts["refused_for_want_of_room"] == 0
    assert facts["tensors_peak_mb"] * 1e6 < 3.3 * size / 2
