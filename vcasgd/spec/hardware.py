"""Hardware of machines, and whether it suits the ``resources`` that a job asks for."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from vcasgd.errors import SpecError
from vcasgd.spec.sections import Resources

#: Part of a size that may be missing: of 16 GB, a machine's programs see a few percent less, and a
#: GPU of 24 GB has 23.9998.
TOLERANCE = 0.05
#: Kinds of machines of a pool that a message describes.
MAX_KINDS = 4


@dataclass(frozen=True)
class Hardware:
    """Processors, memory, and GPUs of a machine.

    ``memory_gb`` and ``gpu_memory_gb``, that of one GPU, are in 10⁹ bytes, and None if they are
    unknown; ``gpu`` is the name of its GPUs, and empty if it is unknown.
    """

    cpus: float
    memory_gb: float | None = None
    gpus: int = 0
    gpu: str = ""
    gpu_memory_gb: float | None = None

    def __str__(self) -> str:
        parts = [f"{self.cpus:g} CPU{'s'[: self.cpus != 1]}"]
        if self.memory_gb is not None:
            parts.append(f"{self.memory_gb:.3g} GB of memory")
        of = "" if self.gpu_memory_gb is None else f" of {self.gpu_memory_gb:.3g} GB"
        name = self.gpu or f"GPU{'s'[: self.gpus != 1]}"
        parts.append(f"{self.gpus} {name}{of}" if self.gpus else "no GPU")
        return ", ".join(parts)


def shortfalls(wanted: Resources, has: Hardware) -> list[str]:
    """Return the fields of ``resources`` that a machine doesn't satisfy.

    What is unknown of a machine satisfies nothing.
    """
    if has.gpus < wanted.least_gpus:
        given = ("gpus", "gpu_types", "gpu_memory")
        return [next(field for field in given if getattr(wanted, field) is not None)]
    types = wanted.gpu_types
    satisfied = {
        "gpu_types": types is None or any(_is_named(kind, has.gpu) for kind in types),
        "gpu_memory": _suffices(has.gpu_memory_gb, wanted.gpu_memory),
        "cpus": wanted.cpus is None or has.cpus >= wanted.cpus,
        "memory": _suffices(has.memory_gb, wanted.memory),
    }
    return [field for field, is_satisfied in satisfied.items() if not is_satisfied]


def suits(wanted: Resources | None, kinds: Collection[Hardware]) -> bool:
    """Return True if a pool has a suitable kind of machine, or if its kinds aren't known yet."""
    return wanted is None or not kinds or any(not shortfalls(wanted, kind) for kind in kinds)


def kinds_text(kinds: Iterable[Hardware]) -> str:
    """Return the kinds of machines of a pool for people."""
    texts = sorted({str(kind) for kind in kinds})
    more = [f"{len(texts) - MAX_KINDS} more kinds"] if len(texts) > MAX_KINDS else []
    return "; ".join([*texts[:MAX_KINDS], *more])


def check_resources(
    wanted: Resources | None, pools: Collection[str], kinds: Mapping[str, Collection[Hardware]]
) -> None:
    """Raise :class:`~vcasgd.errors.SpecError` if no pool of a job has machines that suit it.

    ``pools``: names of the job's pools. ``kinds``: the machines of each pool of the cluster.
    """
    if wanted is None or any(suits(wanted, kinds.get(name, ())) for name in pools):
        return
    missing = [shortfalls(wanted, kind) for name in pools for kind in kinds[name]]
    field = min(missing, key=len)[0]
    asked = " and ".join(f"{name}: {value}" for name, value in wanted.given().items())
    offered = "; ".join(f"pool {name} has {kinds_text(kinds[name])}" for name in pools)
    others = [name for name, of in kinds.items() if name not in pools and of and suits(wanted, of)]
    raise SpecError(
        f"resources.{field}: no machine of the job's pools has {asked}: {offered}",
        remedy=f"add pool {others[0]} to workers.pools, which has such machines"
        if others
        else f"change resources.{field}, or add a pool with such machines to the pools file, where "
        "cpus, memory, gpus, gpu, and gpu_memory say what its machines have",
        field=f"resources.{field}",
    )


def _suffices(has: float | None, wanted: float | None) -> bool:
    return wanted is None or (has is not None and has >= wanted * (1 - TOLERANCE))


def _is_named(kind: str, name: str) -> bool:
    """Return True if a GPU's name has the words of a kind, such as ``A100`` or ``RTX4090``."""
    words, wanted = _words(name), _words(kind)
    runs = {
        "".join(words[start:stop])
        for start in range(len(words))
        for stop in range(start + 1, len(words) + 1)
    }
    return set(wanted) <= set(words) or "".join(wanted) in runs


def _words(name: str) -> list[str]:
    return re.findall("[a-z0-9]+", name.lower())
