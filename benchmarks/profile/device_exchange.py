"""Costs of an exchange on a GPU: copies, differences, encodings, and merges beside steps.

    python benchmarks/profile/device_exchange.py --layers 12 --width 768 --steps 60

Trains a GPT on random tokens, first alone, then with one part of an exchange after every
``--interval`` steps, and prints how long the training thread stands still for it (milliseconds),
and how much of the plain pace is left. Needs only torch; it runs on a CPU with small sizes, too.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

sys.path.append(str(Path(__file__).resolve().parents[1] / "gpu_tasks"))

from gpt_network import Network

CHUNK = 1 << 20


@dataclass
class Training:
    """A plain loop, with a hook after every ``interval`` steps that returns nothing."""

    model: Network
    batch: int
    context: int
    vocabulary: int
    device: torch.device
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch, self.context + 1)
        self.tokens = torch.randint(self.vocabulary, shape, generator=generator).to(self.device)

    def step(self) -> None:
        inputs, targets = self.tokens[:, :-1], self.tokens[:, 1:]
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(inputs)
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def run(self, steps: int, interval: int, exchange: Callable[[], None]) -> tuple[float, float]:
        """Return the seconds of a step with everything, and those that ``exchange`` held this
        thread, per call."""
        self.synchronize()
        held, calls, start = 0.0, 0, time.perf_counter()
        for number in range(steps):
            self.step()
            if number % interval == interval - 1:
                at = time.perf_counter()
                exchange()
                held += time.perf_counter() - at
                calls += 1
        self.synchronize()
        return (time.perf_counter() - start) / steps, held / max(1, calls)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Sink:
    """A socket whose other end a thread of this process reads and discards."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair()
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        buffer = bytearray(CHUNK)
        while self.far.recv_into(buffer):
            pass


class Exchange:
    """The parts of an exchange, each callable from the training thread."""

    def __init__(self, training: Training) -> None:
        self.training, device = training, training.device
        self.parameters = [p.data for p in training.model.parameters()]
        self.length = sum(p.numel() for p in self.parameters)
        self.flat = torch.empty(self.length, device=device)
        self.base = torch.zeros(self.length, device=device)
        pinned = device.type == "cuda"
        self.host = torch.empty(self.length, pin_memory=pinned)
        self.host_bf16 = torch.empty(self.length, dtype=torch.bfloat16, pin_memory=pinned)
        self.pageable = torch.empty(self.length)
        self.views = self._cut(self.flat)
        self.cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream() if self.cuda else None
        self.read = torch.cuda.Event() if self.cuda else None
        self.sink, self.busy = Sink(), threading.Lock()

    def _cut(self, flat: Tensor) -> list[Tensor]:
        pieces = flat.split([p.numel() for p in self.parameters])
        return [piece.view_as(p) for piece, p in zip(pieces, self.parameters, strict=True)]

    def nothing(self) -> None:
        pass

    def tensors_to_pageable(self) -> None:
        """Copy tensor by tensor into pageable memory, as a worker did."""
        at = 0
        for parameter in self.parameters:
            self.pageable[at : at + parameter.numel()].copy_(parameter.view(-1))
            at += parameter.numel()

    def snapshot(self) -> None:
        """Copy the model into one vector on the device, once the last one was read."""
        if self.cuda:
            torch.cuda.current_stream().wait_event(self.read)
        torch._foreach_copy_(self.views, self.parameters)

    def snapshot_to_pinned(self) -> None:
        """And the vector into pinned memory, on a stream of its own."""
        self.snapshot()
        self._beside(lambda: self.host.copy_(self.flat, non_blocking=True))

    def difference_to_pinned(self) -> None:
        """Snapshot, difference, finiteness, and bfloat16 on the device, then pinned memory."""
        self.snapshot()

        def work() -> None:
            difference = self.flat - self.base
            self.finite = difference.isfinite().all()
            self.host_bf16.copy_(difference.bfloat16(), non_blocking=True)

        self._beside(work)

    def int8_to_pinned(self) -> None:
        """Snapshot, difference, and eight bits in blocks of 1024 on the device."""
        self.snapshot()

        def work() -> None:
            difference = self.flat - self.base
            rest = self.length - self.length % 1024
            blocks = difference[:rest].view(-1, 1024)
            scale = blocks.abs().amax(1, keepdim=True).clamp_min_(1e-30) / 127
            codes = (blocks / scale).round_().to(torch.int8)
            self.host_bf16.view(torch.int8)[:rest].copy_(codes.view(-1), non_blocking=True)

        self._beside(work)

    def send_beside(self) -> None:
        """``difference_to_pinned``, and another thread writes as many bytes to a socket.

        It doesn't wait for the copy, because only its cost counts.
        """
        self.difference_to_pinned()
        if self.busy.acquire(blocking=False):
            threading.Thread(target=self._send, daemon=True).start()

    def _send(self) -> None:
        try:
            view = memoryview(self.host_bf16.view(torch.uint8).numpy())
            for start in range(0, len(view), CHUNK):
                self.sink.near.sendall(view[start : start + CHUNK])
        finally:
            self.busy.release()

    def merge(self) -> None:
        """Copy a new base from pinned memory beside training, and add it to the model.

        It is multiplied by zero, which costs the same, so that training continues unchanged.
        """
        self._beside(lambda: self.base.copy_(self.host, non_blocking=True))
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        torch._foreach_add_(self.parameters, self._cut(self.base), alpha=0.0)

    def _beside(self, work: Callable[[], object]) -> None:
        if self.stream is None:
            work()
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            work()
            self.read.record()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--interval", type=int, default=20)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = Network(options.layers, options.width, options.context, options.vocabulary).to(device)
    training = Training(model, options.batch, options.context, options.vocabulary, device)
    exchange = Exchange(training)
    training.run(10, options.interval, exchange.nothing)
    plain, _ = training.run(options.steps, options.interval, exchange.nothing)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(json.dumps({"device": name, "parameters": exchange.length, "step_ms": 1000 * plain}))
    parts = (
        exchange.tensors_to_pageable,
        exchange.snapshot,
        exchange.snapshot_to_pinned,
        exchange.difference_to_pinned,
        exchange.int8_to_pinned,
        exchange.send_beside,
        exchange.merge,
    )
    for part in parts:
        part()
        training.synchronize()
        step, held = training.run(options.steps, options.interval, part)
        row = {
            "part": part.__name__,
            "held_ms": round(1000 * held, 2),
            "step_ms": round(1000 * step, 2),
            "of_plain": round(plain / step, 4),
        }
        print(json.dumps(row), flush=True)
    again, _ = training.run(options.steps, options.interval, exchange.nothing)
    print(json.dumps({"part": "plain again", "of_plain": round(plain / again, 4)}), flush=True)


if __name__ == "__main__":
    main()
