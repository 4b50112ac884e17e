"""Checkpoints of a model: snapshots of all its shards as one safetensors file.

Plain safetensors can open it: it has the model's state under its own names, and in the metadata
the rest of the snapshots, shard by shard.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vcasgd.errors import CheckpointDamaged, NotFound, StorageUnavailable
from vcasgd.learning.layout import DOUBLES, FLOATS, Layout, TensorEntry, TensorKind
from vcasgd.learning.shards import Cut, ShardRange
from vcasgd.learning.vector import doubles_of, read_tensors, refined
from vcasgd.local_files import temporary_folder
from vcasgd.storage.checkpoints import Checkpoints, StoredCheckpoint
from vcasgd.store.tensors.snapshot import Snapshot, encode_integers
from vcasgd.store.tensors.snapshot_index import ModelSnapshot, versions_of

_METADATA = "vcasgd"
#: Name of the update rule's state, float32 [floats], stored beside the model's tensors.
_RULE_STATE = "vcasgd:rule_state"
#: Types of integer state in a file.
_TYPES = {kind: "F64" if kind in DOUBLES else "I64" for kind in TensorKind}
#: Yields a vector, float32 [n], piece by piece. Each piece is valid until the next one.
Pieces = Callable[[], Iterator[Tensor]]
#: Errors of parsing a file that is not a checkpoint.
_PARSE_ERRORS = (
    SafetensorError,
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
    RuntimeError,
)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that was read and verified, with all shards or one.

    ``floats`` is float32 [floats], ``integers`` int64 [integers], and ``state``, the update rule's
    state, float32 [floats], or None if the rule has none; the first and the last one are those of
    the shard.
    """

    name: str
    whole: ModelSnapshot
    floats: Tensor
    integers: Tensor
    state: Tensor | None = None


class ModelCheckpoints(Checkpoints):
    """The checkpoints of one job, with their content."""

    def write(
        self,
        whole: ModelSnapshot,
        layout: Layout,
        floats: Pieces,
        state: Pieces | None = None,
        adapter: str = "",
    ) -> StoredCheckpoint:
        """Write the snapshots of all shards, their vector, and the state of their rules.

        ``floats`` and ``state`` are float32 [floats] each. ``adapter`` is that of the model's
        facts. Raises :class:`CheckpointDamaged` for a layout with gaps, errors of the pieces, and
        :class:`~vcasgd.errors.StorageUnavailable`.
        """
        document = {
            "shards": [snapshot.to_dict() for snapshot in whole],
            "layout": layout.to_json(),
            "adapter": adapter,
        }
        metadata = {_METADATA: json.dumps(document), "format": "pt"}
        vectors = floats, whole[0].meta.integer_vector(), state
        return self.put(versions_of(whole), partial(file_of, layout, metadata, *vectors))

    def read(self, name: str, shard: int | None = None, shards: int = 1) -> LoadedCheckpoint:
        """Read and verify a checkpoint, or one shard of a checkpoint with ``shards``.

        What it needs is copied to this machine's disk first, so no more of it is in memory. Raises
        :class:`CheckpointDamaged`, :class:`~vcasgd.errors.NotFound` and
        :class:`~vcasgd.errors.StorageUnavailable`.
        """
        with temporary_folder("vcasgd-checkpoint-") as folder:
            file = folder / name
            stream = self.open_stream(name)
            try:
                with file.open("w+b") as out:
                    whole = shard is None or shards == 1
                    if whole or not self._copy_part(name, stream.size, out, shard or 0, shards):
                        out.seek(0)
                        out.writelines(stream.chunks)
            except OSError as error:
                raise StorageUnavailable(f"{name} can't be copied to {folder}: {error}") from error
            return parse(file, shard, shards)

    def _copy_part(self, name: str, size: int, out: IO[bytes], shard: int, shards: int) -> bool:
        """Copy what one shard needs of a file of ``size`` bytes.

        Return False if all of it has to be read to know whether it is intact.
        """
        try:
            copy = self.copier(name, size, out)
            copy(0, 8)
            out.seek(0)
            start = 8 + int.from_bytes(out.read(8), "little")
            if start > size:
                return False
            copy(8, start)
            out.seek(8)
            document = json.loads(out.read(start - 8))["__metadata__"][_METADATA]
            for first, last in _ranges_of(json.loads(document), size - start, shard, shards):
                copy(start + first, start + last)
        except (CheckpointDamaged, NotFound, *_PARSE_ERRORS):
            return False
        out.truncate(size)
        return True

    def newest(
        self,
        damaged: Callable[[CheckpointDamaged], None],
        shard: int | None = None,
        shards: int = 1,
    ) -> LoadedCheckpoint | None:
        """Return the newest intact checkpoint, or None; see :meth:`read`.

        Calls ``damaged`` with each damaged one and moves it to ``damaged/``, so that it does not
        count as stored when the job reaches the same version again.
        """
        for stored in reversed(self.all()):
            try:
                return self.read(stored.name, shard, shards)
            except CheckpointDamaged as error:
                damaged(error)
                path = f"{self._prefix}/{stored.name}"
                self._storage.move(path, f"{self._prefix}/damaged/{stored.name}.damaged")
                self._storage.delete(f"{path}.pieces")
            except NotFound:
                continue  # pruned in between
        return None


class TensorsOfFile(Mapping[str, Tensor]):
    """The tensors of a safetensors file, of which no more are in memory than the caller keeps.

    Raises :class:`SafetensorError` and :class:`OSError`.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        with safe_open(file, "pt") as opened:
            self._names = list(opened.keys())
            self.metadata: dict[str, str] = opened.metadata() or {}

    def __getitem__(self, name: str) -> Tensor:
        # The file stays mapped as long as it's open.
        with safe_open(self._file, "pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _ranges_of(document: Any, size: int, shard: int, shards: int) -> list[tuple[int, int]]:
    """Return the ranges of a file's ``size`` bytes behind its header that a shard needs."""
    layout = Layout.from_json(document["layout"])
    if layout.doubles or len(document["shards"]) != shards:
        return [(0, size)]
    part, first = Cut(layout.floats, layout.parameters, shards).parts[shard], 8 * layout.counted
    vectors = range(first, size, 4 * layout.floats)
    return [(0, first), *((at + 4 * part.start, at + 4 * part.stop) for at in vectors)]


def file_of(
    layout: Layout,
    metadata: dict[str, str],
    floats: Pieces,
    integers: Tensor,
    state: Pieces | None = None,
) -> Iterator[bytes]:
    """Yield the bytes of a safetensors file with a model's state and a rule's, tied tensors once.

    ``floats`` and ``state`` are float32 [floats], and ``integers`` is int64 [integers]. The base is
    not in the file, and integer state is int64. Raises :class:`CheckpointDamaged` for a layout with
    gaps, or of other counters.
    """
    if len(integers) != layout.integers:
        raise CheckpointDamaged(f"{len(integers)} counters instead of {layout.integers}")
    yield _header(layout, metadata, has_state=state is not None)
    yield _bytes_of(integers[: layout.counted])
    if layout.doubles:
        yield from _floats(layout, integers, floats(), exact=True)
    yield from _floats(layout, integers, floats(), exact=False)
    for piece in state() if state is not None else ():
        yield _bytes_of(piece)


def _header(layout: Layout, metadata: dict[str, str], *, has_state: bool) -> bytes:
    """Return what a safetensors file has before its tensors. Raises :class:`CheckpointDamaged`.

    Those of 8 bytes come first, and tensors of the same size are in the order of the vectors.
    """
    _ = layout.counters  # They have no gaps.
    typed = [(each, _TYPES[each.kind]) for each in layout.entries if each.kind not in FLOATS]
    typed += [(each, "F64") for each, _ in layout.exact]
    typed += [(each, "F32") for each in _in_order(layout) if each.name not in layout.doubles]
    if has_state:
        typed.append((TensorEntry(_RULE_STATE, (layout.floats,), TensorKind.STATISTIC, 0), "F32"))
    header: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for entry, dtype in typed:
        stop = start + entry.size * int(dtype[1:]) // 8
        described = {"dtype": dtype, "shape": entry.shape, "data_offsets": [start, stop]}
        if dtype == "F32" and entry.name in layout.complexes:
            # The format has no complex numbers in double precision.
            described |= {"dtype": "C64", "shape": entry.shape[:-1]}
        header[entry.name], start = described, stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _in_order(layout: Layout) -> list[TensorEntry]:
    """Return the tensors of the float32 vector in its order. Raises :class:`CheckpointDamaged`."""
    entries = [entry for entry in layout.entries if entry.kind in FLOATS]
    entries.sort(key=lambda entry: (entry.offset, entry.size))
    end = 0
    for entry in entries:
        if entry.offset != end:
            raise CheckpointDamaged(f"layout: {entry.name} isn't where the previous one ends")
        end += entry.size
    return entries


def _floats(
    layout: Layout, integers: Tensor, pieces: Iterator[Tensor], *, exact: bool
) -> Iterator[bytes]:
    """Yield the tensors of a vector that are ``exact``, as float64, or the others, as float32."""
    doubles = {entry.name: doubles_of(integers, at, entry) for entry, at in layout.exact}
    piece = torch.empty(0)
    for entry in _in_order(layout):
        left, rounded = entry.size, []
        while left:
            piece = piece if len(piece) else next(pieces)
            part, piece = piece[:left], piece[left:]
            left -= len(part)
            if entry.name in doubles:
                rounded.append(part.clone() if exact else part)
            elif not exact:
                yield _bytes_of(part)
        if exact and entry.name in doubles:
            whole = torch.cat(rounded).view(entry.shape) if rounded else torch.empty(entry.shape)
            yield _bytes_of(refined(whole, doubles[entry.name]))


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def parse(file: Path, shard: int | None = None, shards: int = 1) -> LoadedCheckpoint:
    """Parse a checkpoint file, or one shard of a file with ``shards``.

    Raises :class:`CheckpointDamaged`.
    """
    name = file.name
    try:
        tensors = TensorsOfFile(file)
        document = json.loads(tensors.metadata[_METADATA])
        whole = tuple(Snapshot.from_dict(each) for each in document["shards"])
        layout = Layout.from_json(document["layout"])
        _check(name, layout, whole, shard, shards)
        all_of_it = ShardRange(0, 0, layout.floats, layout.parameters)
        part = all_of_it if shard is None else _cut(layout, whole).parts[shard]
        floats = torch.zeros(part.floats)
        integers = read_tensors(layout, tensors, floats, part.start)
        state = _rule_state(whole if shard is None else whole[shard : shard + 1], layout, tensors)
        own = None if state is None else part.of(state).clone()
    except _PARSE_ERRORS as error:
        raise CheckpointDamaged(f"checkpoint {name}: {type(error).__name__}: {error}") from error
    if whole[0].meta.integers != encode_integers(integers):
        raise CheckpointDamaged(f"checkpoint {name}: its counters disagree with its metadata")
    return LoadedCheckpoint(name, whole, floats, integers, own)


def _cut(layout: Layout, whole: ModelSnapshot) -> Cut:
    return Cut(layout.floats, layout.parameters, len(whole))


def _check(name: str, layout: Layout, whole: ModelSnapshot, shard: int | None, shards: int) -> None:
    """Raise :class:`CheckpointDamaged` for shards that aren't those of the layout, or the job."""
    if not whole or any(
        each.meta.floats != part.floats
        for each, part in zip(whole, _cut(layout, whole).parts, strict=True)
    ):
        raise CheckpointDamaged(f"checkpoint {name}: its layout disagrees with its metadata")
    if shard is not None and len(whole) != shards:
        raise CheckpointDamaged(
            f"checkpoint {name} has {len(whole)} shards, one per store node, "
            f"but this job has {shards}"
        )


def _rule_state(
    whole: ModelSnapshot, layout: Layout, tensors: Mapping[str, Tensor]
) -> Tensor | None:
    if not any(each.meta.rule_state for each in whole):
        return None
    state = tensors[_RULE_STATE]
    if state.shape != (layout.floats,) or state.dtype != torch.float32:
        raise ValueError(f"the rule's state has shape {list(state.shape)}")
    return state
