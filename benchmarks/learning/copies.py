"""Workers' copies of a model and the late merges of their fragments, for ``long_rounds.py``."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from plain import evaluate
from torch import Tensor, nn

from vcasgd.learning.encodings import CODECS
from vcasgd.learning.local_moments import LocalMoments
from vcasgd.task.task import Task


@dataclass(frozen=True)
class Run:
    """One job and its policy. A round has ``steps`` local steps, an exchange takes ``exchange``.

    ``steps`` grows from ``first`` in proportion to ``progress ** power`` and reaches its value at
    ``grown``. With ``overlap``, workers train on and merge ``exchange / fragments`` steps later,
    ``merge`` times what their copy lacks; otherwise they wait. ``wait_until`` is the progress up
    to which they wait nevertheless.
    """

    task: str
    seed: int
    workers: int
    exchange: int = 0
    steps: int = 1
    length: float = 1.0
    first: int = 0
    grown: float = 0.0
    power: float = 2.0
    overlap: bool = False
    wait_until: float = 0.0
    merge: float = 1.0
    fragments: int = 1
    first_moments: bool = False
    outer_rate: float = 1.0
    outer_momentum: float = 0.0
    corrected: bool = True
    #: Second moments are corrected for a share of ``workers ** -share_power`` of the batch.
    share_power: float = 1.0
    codec: str = "float32"
    guess: float = 0.0
    #: Local steps over which a late merge is spread.
    spread: int = 1
    #: Factor of the job's batch and of its learning rate.
    batch: int = 1
    rate: float = 1.0
    args: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """Everything that differs from the defaults."""
        default = Run("", -1, 0)
        fields = asdict(self)
        changed = {k: v for k, v in fields.items() if v != getattr(default, k)}
        return json.dumps(changed, sort_keys=True)

    def round_steps(self, progress: float) -> int:
        """Return the local steps of a round that starts at a progress."""
        if not self.grown or progress >= self.grown:
            return self.steps
        return max(self.first, round(self.steps * (progress / self.grown) ** self.power), 1)


class Copies:
    """The workers' copies: rows of one matrix, so that one optimizer steps all of them."""

    def __init__(self, task: Task, run: Run) -> None:
        torch.manual_seed(run.seed)
        self.task, self.workers = task, run.workers
        first = task.model()
        state = first.state_dict()
        self.modules: list[nn.Module] = [first]
        for _ in range(run.workers - 1):
            module = task.model()
            module.load_state_dict(state)
            self.modules.append(module)
        size = sum(each.numel() for each in first.parameters())
        self.rows = torch.zeros(run.workers, size)
        self.rows.grad = torch.zeros_like(self.rows)
        for row, gradient, module in zip(self.rows, self.rows.grad, self.modules, strict=True):
            at = 0
            for parameter in module.parameters():
                stop = at + parameter.numel()
                row[at:stop] = parameter.detach().flatten()
                parameter.data = row[at:stop].view(parameter.shape)
                parameter.grad = gradient[at:stop].view(parameter.shape)
                at = stop
        self.optimizer = task.optimizer([self.rows])  # type: ignore[list-item]
        self.rate = self.optimizer.param_groups[0]["lr"] * run.rate
        self.moments = LocalMoments(self.optimizer) if run.corrected else None
        if self.moments is not None:
            self.moments.follow(run.workers**-run.share_power)
        self.validation = task.dataset("validation")

    def step(self, batches: list[Any], progress: float) -> float:
        """Make one local step of all workers; return the mean loss before it."""
        task, total = self.task, 0.0
        assert self.rows.grad is not None
        self.rows.grad.zero_()
        for module, batch in zip(self.modules, batches, strict=True):
            loss = task.loss(module, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        if task.clip_norm is not None:
            most = task.clip_norm * math.sqrt(self.workers if self.moments else 1)
            norms = self.rows.grad.norm(dim=1, keepdim=True)
            self.rows.grad.mul_((most / (norms + 1e-6)).clamp(max=1))
        self.optimizer.param_groups[0]["lr"] = self.rate * task.schedule(progress)
        self.optimizer.step()
        return total / self.workers

    def first_moments(self) -> Tensor | None:
        state = self.optimizer.state.get(self.rows, {})
        found = state.get("exp_avg", state.get("momentum_buffer"))
        return found if isinstance(found, Tensor) else None

    def evaluate(self) -> dict[str, float]:
        """Evaluate the mean of the copies."""
        kept = self.rows[0].clone()
        self.rows[0] = self.rows.mean(0)
        metrics = evaluate(self.task, self.modules[0], self.validation)
        self.rows[0] = kept
        return metrics


class Channel:
    """Direction of an exchange, with error feedback: the next vector has what encodings lost."""

    def __init__(self, codec: str) -> None:
        self.codec = CODECS[codec]()
        self.lost: Tensor | float = 0.0

    def send(self, vector: Tensor) -> Tensor:
        """Return what arrives of a vector."""
        if self.codec.name == "float32":
            return vector
        wanted = vector + self.lost
        scratch = torch.empty(len(vector) + self.codec.block_floats)
        payload = memoryview(bytearray(self.codec.encode(wanted)))
        arrived = self.codec.decode(payload, scratch)[: len(vector)].clone()
        self.lost = wanted - arrived
        return arrived


class Fragment:
    """A slice of the vector, exchanged on its own: the version, and what is under way."""

    def __init__(self, copies: Copies, run: Run, part: slice) -> None:
        self.copies, self.run, self.part = copies, run, part
        self.start = copies.rows[:, part].clone()
        self.exact = self.start[0].clone()
        self.published = self.exact.clone()
        self.momentum = torch.zeros_like(self.exact)
        self.channels = [Channel(run.codec) for _ in range(run.workers + 1)]
        self.sent: Tensor | None = None
        self.base: Tensor | None = None
        self.sent_moments: Tensor | None = None
        self.last_mean = torch.zeros_like(self.exact)
        self.due = self.next = 0.0
        self.left = 0
        self.pending = torch.zeros_like(self.start)

    def trickle(self) -> None:
        """Apply the next part of a merge that is spread over several steps."""
        if self.left:
            part = self.pending / self.left
            self.copies.rows[:, self.part] += part
            self.pending -= part
            self.left -= 1

    def send(self) -> None:
        own, run = self.copies.rows[:, self.part], self.run
        self.sent = own + self.pending if self.left else own.clone()
        if run.guess and run.overlap:
            # The other workers' part of the mean is what it was in the last round.
            others = run.guess * (1 - 1 / run.workers)
            own.sub_(others * (self.sent - self.start - self.last_mean))
        self.base = self.sent if self.left else own.clone()
        moments = self.copies.first_moments()
        if self.run.first_moments and moments is not None:
            self.sent_moments = moments[:, self.part].clone()

    def merge(self, late: bool) -> None:
        """Take the mean of what was sent; ``late`` if the workers trained on meanwhile."""
        run, sent, base = self.run, self.sent, self.base
        assert sent is not None
        assert base is not None
        arrived = [
            channel.send(difference)
            for channel, difference in zip(self.channels, sent - self.start, strict=False)
        ]
        mean = self.last_mean = torch.stack(arrived).mean(0)
        self.momentum.mul_(run.outer_momentum).add_(mean)
        if run.outer_momentum:
            mean = mean + run.outer_momentum * self.momentum
        self.exact.add_(mean, alpha=run.outer_rate)
        ahead = self.exact - self.published
        if run.codec != "float32":
            # What the encoding loses stays a difference, so it needs no error feedback.
            self.channels[-1].lost = 0.0
            ahead = self.channels[-1].send(ahead)
        self.published = self.published + ahead
        factor = run.merge if late else 1.0
        # The part that all workers share is never damped.
        middle = base.mean(0)
        shift = factor * (middle - base) + (self.published - middle)
        own = self.copies.rows[:, self.part]
        if late and run.spread > 1:
            self.pending = shift + (self.pending if self.left else 0)
            self.left = run.spread
        else:
            own.add_(shift)
        self.start, self.sent = base + shift, None
        moments = self.copies.first_moments()
        if self.sent_moments is not None and moments is not None:
            moments[:, self.part] += factor * (self.sent_moments.mean(0) - self.sent_moments)
        self.sent_moments = None
