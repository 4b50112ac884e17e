"""Files of downloaded models that other libraries open: complete state dicts and PEFT adapters.

A checkpoint has only what training changes. The base is added here: from its location in the job
file, or from the task's code on this computer. Digests in the checkpoint identify each tensor, so
the names in a base's files don't matter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vcasgd.errors import CheckpointDamaged, SpecError
from vcasgd.learning.base import BaseTensor, as_real, digest_of
from vcasgd.learning.layout import BESIDE, FLOATS, Layout
from vcasgd.spec.job import JobSpec

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

#: Names in safetensors files that are no tensors of the model.
_PREFIX = "vcasgd:"
#: Name of the average, as :mod:`vcasgd.storage.model_checkpoints` writes it.
STATE = f"{_PREFIX}rule_state"
#: Most bytes of a safetensors header; the format allows no more.
LARGEST_HEADER = 100_000_000
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True)
class StoredModel:
    """A checkpoint's file, the layout of its tensors, and its PEFT adapter or None."""

    path: Path
    layout: Layout
    adapter: dict[str, Any] | None

    @classmethod
    def read(cls, path: Path) -> StoredModel | None:
        """Read the description of a checkpoint; None for other files.

        Raises :class:`CheckpointDamaged` if it can't be read.
        """
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            head = file.read(min(size, LARGEST_HEADER))
        try:
            document = json.loads(json.loads(head)["__metadata__"]["vcasgd"])
        except (KeyError, TypeError, ValueError):
            return None
        try:
            adapter = json.loads(document.get("adapter") or "null")
            if adapter is not None:
                _ = dict(adapter["config"]), dict(adapter["tensors"])
            return cls(path, Layout.from_json(document["layout"]), adapter)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointDamaged(f"{path.name}: {error!r}") from error

    @property
    def is_complete(self) -> bool:
        """True if the file is the model's whole state dict."""
        has_more = any(entry.name.startswith(BESIDE) for entry in self.layout.entries)
        return self.adapter is None and not self.layout.base and not has_more

    def tensors(self, *, ema: bool = False) -> dict[str, Tensor]:
        """Return the trained tensors by their names in the model, and those beside it.

        With ``ema``, parameters are their average. Raises :class:`CheckpointDamaged` if the
        checkpoint has none.
        """
        from safetensors.torch import load_file

        loaded = load_file(self.path)
        tensors = {name: each for name, each in loaded.items() if not name.startswith(_PREFIX)}
        if not ema:
            return tensors
        average = loaded.get(STATE)
        if average is None or average.shape != (self.layout.floats,):
            raise CheckpointDamaged(f"{self.path.name} has no average of its parameters")
        for entry in self.layout.entries:
            of_model = entry.name in tensors and not entry.name.startswith(BESIDE)
            if of_model and entry.kind in FLOATS:
                # A complex one has its real numbers in the vector.
                as_real(tensors[entry.name]).copy_(entry.view(average, average))
        return tensors


def finish(
    file: Path, target: Path, spec: JobSpec, working_dir: Path | None, *, ema: bool = False
) -> Path:
    """Turn a downloaded checkpoint into what other libraries open, and return its path.

    This is a folder for a PEFT adapter, and otherwise the file ``target``, with the base. ``file``
    may be moved. With ``ema``, the parameters are their average. Raises :class:`SpecError` if a
    tensor of the base is nowhere to be found, or the job keeps no average.
    """
    model = StoredModel.read(file)
    if ema and (model is None or spec.ema is None):
        raise SpecError(
            "ema: the job keeps no average of its parameters",
            remedy="set ema in the job file, for example to 0.999",
            field="ema",
        )
    if model is None or (model.is_complete and not ema):
        return file.replace(target)
    tensors = model.tensors(ema=ema)
    names = [name for name in tensors if name.startswith(BESIDE)]
    # What travelled beside the model, such as an average of the task's own.
    if beside := {name.removeprefix(BESIDE): tensors.pop(name) for name in names}:
        write(beside, target.with_name(f"{target.stem}-beside.safetensors"))
    if model.adapter is not None:
        folder = target.with_suffix("") if target.suffix == ".safetensors" else target
        return write_adapter(model, tensors, folder)
    base = _base(model.layout.base, spec, working_dir) if model.layout.base else {}
    return write({**base, **tensors}, target)


def load_module(spec: JobSpec, digest: str, package: bytes, file: Path) -> Module:
    """Return a job's module, with the tensors of a downloaded checkpoint, in evaluation mode.

    ``package``: the zip with this digest that has the job's code, which runs. Raises the errors of
    :func:`~vcasgd.session.script.load`, and :class:`CheckpointDamaged` if the file's tensors don't
    fit the module.
    """
    from vcasgd.learning.training import build
    from vcasgd.local_files import default_cache_folder
    from vcasgd.session.script import load
    from vcasgd.settings import load_settings
    from vcasgd.storage.base_files import prepare_base
    from vcasgd.task.package import unpack

    settings = load_settings()
    code = unpack(package, digest, settings.cache_dir or default_cache_folder("packages"))
    prepare_base(spec.base, settings)
    model = StoredModel.read(file)
    if model is None:
        raise CheckpointDamaged(f"{file.name} is not a checkpoint")
    module = build(load(spec.task, spec.args, code), spec.seed, "cpu")
    try:
        module.load_state_dict(model.tensors(), strict=False)
    except RuntimeError as error:
        problem = f"{file.name} doesn't fit the model of {spec.task}: {error}"
        raise CheckpointDamaged(problem) from error
    return module.eval()


def write_adapter(model: StoredModel, trained: dict[str, Tensor], folder: Path) -> Path:
    """Write a PEFT adapter into a new or existing folder, and return it."""
    assert model.adapter is not None
    names: dict[str, str] = model.adapter["tensors"]
    missing = sorted(set(names.values()) - trained.keys())
    if missing:
        raise CheckpointDamaged(f"{model.path.name} lacks {missing[0]} of the adapter")
    folder.mkdir(parents=True, exist_ok=True)
    write({saved: trained[name] for saved, name in names.items()}, folder / WEIGHTS)
    with _appearing(folder / CONFIG) as part:
        part.write_text(json.dumps(model.adapter["config"], indent=2, sort_keys=True) + "\n")
    return folder


def write(tensors: dict[str, Tensor], target: Path) -> Path:
    """Write a safetensors file, and return its path."""
    from safetensors.torch import save_file

    with _appearing(target) as part:
        save_file(tensors, part, metadata={"format": "pt"})
    return target


def _base(
    wanted: tuple[BaseTensor, ...], spec: JobSpec, working_dir: Path | None
) -> dict[str, Tensor]:
    """Return the base, from ``spec.base`` or, where that is not enough, from running the task's
    ``model`` in ``working_dir``. Raises :class:`SpecError` if a tensor is in neither."""
    found: dict[str, Tensor] = {}
    sources = (_from_location(spec), _from_code(spec, working_dir))
    for source in sources:
        _collect(source, [tensor for tensor in wanted if tensor.name not in found], found)
        if len(found) == len(wanted):
            return found
    name = next(tensor.name for tensor in wanted if tensor.name not in found)
    raise SpecError(
        f"{name} of the base was not found with the values that the job trained with",
        remedy="name the folder of the job's code with --working-dir, whose task builds it, or "
        "download only what was trained with --trained-only",
        field="base",
    )


def _collect(
    source: Iterator[tuple[str, Tensor]], wanted: list[BaseTensor], found: dict[str, Tensor]
) -> None:
    shapes = {each.shape for each in wanted}
    for _, tensor in source:
        if tuple(tensor.shape) not in shapes:
            continue
        digest = digest_of(tensor)
        for each in wanted:
            if (each.shape, each.digest) == (tuple(tensor.shape), digest):
                # A copy, because a file can't have two names for the same memory.
                found[each.name] = tensor.detach().cpu().clone().contiguous()


def _from_location(spec: JobSpec) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the base's files, if they are safetensors."""
    if spec.base is None:
        return
    from safetensors import safe_open

    from vcasgd.settings import load_settings
    from vcasgd.storage.base_files import prepare_base
    from vcasgd.task.task import base

    prepare_base(spec.base, load_settings())
    path = base()
    for file in sorted(path.glob("**/*.safetensors")) if path.is_dir() else [path]:
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as tensors:
                yield from ((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118 - not a dict


def _from_code(spec: JobSpec, working_dir: Path | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the frozen tensors of the model that the task builds on this computer."""
    if working_dir is None:
        return
    from vcasgd.learning.base import base_tensors
    from vcasgd.learning.training import build
    from vcasgd.session.script import load
    from vcasgd.settings import load_settings
    from vcasgd.storage.base_files import prepare_base

    prepare_base(spec.base, load_settings())
    task = load(spec.task, spec.args, working_dir.resolve())
    module = build(task, spec.seed, "cpu")
    yield from base_tensors(module, task.base_buffers(module)).items()


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """Yield the path of a file that becomes ``target`` once it is complete."""
    part = target.with_name(f".{target.name}.part")
    try:
        # The library for safetensors makes files that only their owner can read.
        part.touch()
        mode = part.stat().st_mode
        yield part
        part.chmod(mode)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
