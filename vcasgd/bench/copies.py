"""How often the bytes of one update are copied, from a worker's tensor to another worker's.

The table is written down from the code and has to change with it. A copy is a write of the
whole payload, or of the whole model, to other memory; ``kernel`` marks those that a socket
makes. Work that only reads (checksums, the check for infinities) and the blending itself are
none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

ALL_CODECS = ("float32", "bfloat16")


@dataclass(frozen=True)
class Copy:
    """One copy: in which process, from what to what."""

    process: str
    what: str
    kernel: bool = False
    codecs: tuple[str, ...] = ALL_CODECS


def _receive(process: str, into: str) -> tuple[Copy, ...]:
    """The wire receives straight into the memory where the bytes belong."""
    return (
        Copy("tensors", "string to reply buffer"),
        Copy("tensors", "reply buffer to socket", kernel=True),
        Copy(process, f"socket to {into}", kernel=True),
    )


def _send(process: str, source: str) -> tuple[Copy, ...]:
    """The server reads a large value straight into the memory that it keeps."""
    return (
        Copy(process, f"{source} to socket", kernel=True),
        Copy("tensors", "socket to string", kernel=True),
    )


#: in the order in which they happen
PATH: tuple[tuple[str, tuple[Copy, ...]], ...] = (
    (
        "push",
        (
            Copy("worker", "vector to its encoding, chunk by chunk", codecs=("bfloat16",)),
            *_send("worker", "payload"),
        ),
    ),
    ("claim", _receive("server", "the payload's buffer")),
    (
        "decode",
        (Copy("server", "payload's buffer to the piece that is blended", codecs=("bfloat16",)),),
    ),
    (
        "publish",
        (
            Copy("server", "weights to the high plane", codecs=("bfloat16",)),
            *_send("server", "weights"),
        ),
    ),
    (
        "fetch",
        (
            *_receive("other worker", "the learner's vector"),
            Copy("other worker", "high plane to the learner's vector", codecs=("bfloat16",)),
        ),
    ),
)


def copies(codec: str) -> Iterator[tuple[str, Copy]]:
    """Stage and copy, in order, with one encoding of updates."""
    for stage, steps in PATH:
        for step in steps:
            if codec in step.codecs:
                yield stage, step


def copies_per_update(codec: str) -> int:
    return sum(1 for _ in copies(codec))
