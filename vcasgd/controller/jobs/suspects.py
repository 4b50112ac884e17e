"""Owners whose work was wrong: which of it to undo, and from which checkpoint. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vcasgd.store.ledger.job import JobRecord
from vcasgd.store.ledger.owners import Suspect


def suspect_to_undo(job: JobRecord) -> tuple[str, Suspect] | None:
    """Return an owner of which updates were applied that may be wrong; None if all are undone."""
    for owner, suspect in sorted(job.tuned.suspects.items()):
        if suspect.version is not None and owner not in job.tuned.undone:
            return owner, suspect
    return None


def checkpoint_before(suspect: Suspect, listed: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the newest checkpoint without updates that may be wrong, else the oldest one.

    ``listed`` are descriptions by name. Returns None if there is no checkpoint.
    """
    versions = {name: each["versions"][suspect.shard] for name, each in listed.items()}
    if not versions:
        return None
    clean = {name: each for name, each in versions.items() if each <= (suspect.version or 0)}
    if clean:
        return max(clean, key=lambda name: clean[name])
    return min(versions, key=lambda name: versions[name])
