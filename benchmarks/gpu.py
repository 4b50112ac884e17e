"""Real models on a GPU: workers with the default settings against a plain PyTorch loop.

    python benchmarks/gpu.py [--limit 460] [--small] [--only gpt-124m audit]

Trains GPTs, a residual network on JPEG files, and LoRA with Hugging Face: a plain loop, then a job
with one worker and with two that share the GPU, one of which is killed. Then it audits. Writes
``benchmarks/results/gpu.md`` after each part, if there is a GPU. ``--small`` has sizes for a CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import machine
from markdown import table

HERE = Path(__file__).resolve().parent
TASKS = HERE / "gpu_tasks"
sys.path.insert(0, str(HERE.parent))

from vcasgd.chaos.audit import UNREPLICATED, audit  # noqa: E402
from vcasgd.chaos.audited_job import AuditedJob  # noqa: E402
from vcasgd.client import Client, Job  # noqa: E402
from vcasgd.gpus import peak_flops  # noqa: E402
from vcasgd.settings import Settings  # noqa: E402
from vcasgd.spec.job import JobSpec  # noqa: E402
from vcasgd.stack import StackHome, running  # noqa: E402
from vcasgd.task.task import Task, load_task  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORKERS = 2
READY_SECONDS = 120.0
END_SECONDS = 20.0
POLL_SECONDS = 0.1
#: Changes of a job's count of samples between which its rate is measured, at least.
MIN_CHANGES = 4
#: A rate that needs more seconds than asked for gets so many times as much.
MAX_STRETCH = 3
#: A part is left out if less time is left.
MIN_SECONDS = 40.0
PHOTOS, LARGE_EDGE, SMALL_EDGE = 2048, 256, 64


@dataclass(frozen=True)
class Model:
    """A task of ``gpu_tasks``, with its arguments and those of ``--small``."""

    name: str
    task: str
    large: dict[str, Any]
    small: dict[str, Any]
    #: Libraries that it needs besides torch.
    needs: tuple[str, ...] = ()


GPT_SMALL = {"layers": 2, "width": 64, "context": 32, "vocabulary": 512, "batch": 8}
MODELS = (
    Model("gpt-124m", "gpt:Gpt", {"layers": 12, "width": 768}, GPT_SMALL),
    Model("gpt-350m", "gpt:Gpt", {"layers": 24, "width": 1024, "batch": 16}, GPT_SMALL),
    Model(
        "resnet-50",
        "photos:Classify",
        {"blocks": [3, 4, 6, 3], "width": 64, "batch": 128, "loaders": 12},
        {"blocks": [1, 1], "width": 8, "batch": 8, "loaders": 1},
        needs=("PIL",),
    ),
    Model(
        "lora",
        "lora:Lora",
        {"layers": 16, "width": 1024},
        {"layers": 2, "width": 64, "context": 32, "batch": 4},
        needs=("transformers", "peft"),
    ),
)
AUDIT = "audit"
#: Models and numbers of workers, the most important ones first; 0 is the plain loop.
ORDER = (
    ("gpt-124m", 0),
    ("gpt-124m", 1),
    ("gpt-124m", 2),
    ("gpt-350m", 0),
    ("gpt-350m", 1),
    ("resnet-50", 0),
    ("resnet-50", 1),
    ("lora", 0),
    ("lora", 1),
    (AUDIT, 0),
    ("gpt-350m", 2),
    ("resnet-50", 2),
    ("lora", 2),
)
#: The job of which a worker is killed.
KILLED = ("gpt-124m", 2)

PAGE = """\
# Real models on a GPU

    {command}

Workers of a local stack with the default settings, and a plain PyTorch loop with the same model,
batches, precision, and loader processes. Two workers share the GPU. Samples count when they are in
the job's model; *trained* are those that workers report over a minute. The utilization is that of
the card's peak in 16 bits, from the operations of the model.

{machine}

{table}

{notes}
"""
HEADS = (
    "model",
    "million parameters that train",
    "",
    "samples/s",
    "trained, samples/s",
    "of the plain loop",
    "model FLOPs utilization",
    "GPU memory in use, GB",
    "first update after",
)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after so many seconds, or at once if they are too few for a part."""
    if seconds < MIN_SECONDS:
        raise TimeoutError("no time was left")

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError("the time of the whole run was over")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@dataclass
class Row:
    """Rate of a model in a plain loop (no workers) or a job, and what it took."""

    model: str
    workers: int
    samples_per_second: float
    #: As the workers report; others may not be in the model yet.
    trained_per_second: float | None = None
    millions: float | None = None
    flops_per_sample: float | None = None
    gpu_gb: float | None = None
    first_update_seconds: float | None = None
    devices: tuple[str, ...] = ()
    doing: str = ""

    def utilization(self) -> float | None:
        peak = peak_flops(card()) if DEVICE == "cuda" else None
        if peak is None or self.flops_per_sample is None:
            return None
        return self.samples_per_second * self.flops_per_sample / peak


def card() -> str:
    return torch.cuda.get_device_name() if DEVICE == "cuda" else "no GPU"


# -- the plain loop --------------------------------------------------------------------------------


def plain(model: Model, task: Task, seconds: float) -> Row:
    """Train in this process for a while, and return the rate of the second part."""
    torch.manual_seed(0)
    if DEVICE == "cpu":
        # As a worker of the local pool.
        torch.set_num_threads(1)
    network = task.model().to(DEVICE)
    trained = [each for each in network.parameters() if each.requires_grad]
    optimizer = task.optimizer(trained)
    steps = _steps(task, network, trained, optimizer)
    _run(steps, seconds / 2)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    count, taken = _run(steps, seconds)
    steps.close()
    row = Row(
        model.name,
        0,
        samples_per_second=count * task.batch_size / taken,
        millions=sum(each.numel() for each in trained) / 1e6,
        flops_per_sample=getattr(task, "flops_per_sample", None),
        doing="plain loop",
    )
    if DEVICE == "cuda":
        row.gpu_gb = torch.cuda.max_memory_reserved() / 1e9
        del network, trained, optimizer, steps
        torch.cuda.empty_cache()
    return row


def _steps(
    task: Task, network: nn.Module, trained: list[nn.Parameter], optimizer: torch.optim.Optimizer
) -> Iterator[None]:
    """Make a step each time."""
    loader = DataLoader(
        task.dataset("train"),
        task.batch_size,
        shuffle=True,
        num_workers=task.loader_workers,
        pin_memory=DEVICE == "cuda",
    )
    for batch in loader:
        inputs = [part.to(DEVICE, non_blocking=True) for part in batch]
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = task.loss(network, inputs)
        loss.backward()
        if task.clip_norm is not None:
            nn.utils.clip_grad_norm_(trained, task.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def _run(steps: Iterator[None], seconds: float) -> tuple[int, float]:
    """Return the steps in about so many seconds, and the seconds."""
    _synchronize()
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        next(steps)
        count += 1
    _synchronize()
    return count, time.perf_counter() - started


def _synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


# -- jobs ------------------------------------------------------------------------------------------


class Jobs:
    """Jobs on one stack, one after the other."""

    def __init__(self, client: Client, seconds: float) -> None:
        self._client, self._seconds = client, seconds

    def measure(self, model: Model, args: dict[str, Any], workers: int) -> list[Row]:
        """Train a job for a while; return its rate, and that after a kill if it has one."""
        submitted = time.monotonic()
        with self._job(model, args, workers) as job:
            self._await(job, workers)
            first = time.monotonic() - submitted
            time.sleep(self._seconds / 2)
            row = self._row(model, job, workers, f"{workers} worker{'s' * (workers > 1)}")
            row.first_update_seconds = first
            rows = [row]
            if (model.name, workers) == KILLED:
                victim = next(worker for worker in job.workers() if worker.pushes)
                self._client.evict(victim.name, kill=True)
                doing = "2 workers, from the kill of one of them on"
                rows.append(self._row(model, job, workers, doing, after_kill=True))
        return rows

    @contextmanager
    def _job(self, model: Model, args: dict[str, Any], workers: int) -> Iterator[Job]:
        spec = {
            "name": model.name,
            "task": model.task,
            "working_dir": str(TASKS),
            "args": args,
            # More than it makes.
            "epochs": 1000,
            "workers": {"min": workers, "max": workers},
        }
        job = self._client.submit_directory(JobSpec.parse(spec))
        try:
            yield job
            last = job.refreshed()
            if last.over:
                raise RuntimeError(f"the job {last.state}: {last.reason}\n{last.traceback or ''}")
        finally:
            if not job.refreshed().over:
                job.cancel()
            self._await_end(job)

    def _await_end(self, job: Job) -> None:
        """Wait until no machine works for the job, because the next one needs the memory."""
        deadline = time.monotonic() + END_SECONDS
        while any(each.job == job.id for each in self._client.machines()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"machines worked for an ended job for {END_SECONDS:g} s")
            time.sleep(POLL_SECONDS)

    def _await(self, job: Job, workers: int) -> None:
        """Wait until all workers push."""
        deadline = time.monotonic() + READY_SECONDS
        while sum(bool(worker.pushes) for worker in job.workers()) < workers:
            if job.refreshed().over:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all workers pushed within {READY_SECONDS:g} s")
            time.sleep(POLL_SECONDS)

    def _row(
        self, model: Model, job: Job, workers: int, doing: str, *, after_kill: bool = False
    ) -> Row:
        row = Row(model.name, workers, self._rate(job, 0 if after_kill else 1), doing=doing)
        beats = job.workers()
        row.trained_per_second = sum(beat.samples_per_second or 0.0 for beat in beats)
        row.devices = tuple(sorted({beat.device or "?" for beat in beats}))
        used = [
            beat.gpu_memory_bytes - (beat.gpu_memory_free_bytes or 0)
            for beat in beats
            if beat.gpu_memory_bytes
        ]
        row.gpu_gb = max(used) / 1e9 if used else None
        return row

    def _rate(self, job: Job, first: int) -> float:
        """Return the samples per second from an update of a while on until its last one.

        With 0, those from now on.
        """
        started, changes = time.monotonic(), [(time.monotonic(), self._applied(job))]
        while (passed := time.monotonic() - started) < MAX_STRETCH * self._seconds:
            if passed > self._seconds and len(changes) > MIN_CHANGES:
                break
            applied = self._applied(job)
            if applied != changes[-1][1]:
                changes.append((time.monotonic(), applied))
            time.sleep(POLL_SECONDS)
        if len(changes) < 3:
            # Rounds are long. This counts the wait for the first one, too.
            first = 0
        (since, before), (until, after) = changes[first], changes[-1]
        return (after - before) / (until - since) if until > since else 0.0

    def _applied(self, job: Job) -> int:
        return job.refreshed().progress.samples_applied


def run_audit() -> str:
    """Return what an audit found, in which all machines are on the GPU."""
    devices: set[str] = set()

    @contextmanager
    def watched(audited: AuditedJob) -> Iterator[None]:
        yield
        workers = audited.client.job(audited.id).workers()
        devices.update(worker.device or "?" for worker in workers)

    report = audit(print, watched, kills=len(UNREPLICATED))
    return (
        f"Audit on {', '.join(sorted(devices))}: {sum(report.kills.values())} kills, "
        f"{report.samples_lost} samples lost, {report.samples_repeated} repeated, "
        f"{'passed' if report.passed else f'failed: {report.failure}'} in {report.seconds:.0f} s."
    )


# -- the page --------------------------------------------------------------------------------------


def page(rows: list[Row], notes: list[str], command: str) -> str:
    plain_rows = {row.model: row for row in rows if not row.workers}
    shown = []
    for row in rows:
        loop = plain_rows.get(row.model)
        row.flops_per_sample = loop.flops_per_sample if loop else None
        utilization = row.utilization()
        share = row.samples_per_second / loop.samples_per_second if loop else None
        first = row.first_update_seconds
        shown.append(
            [
                row.model,
                f"{row.millions:.1f}" if row.millions else "",
                row.doing,
                f"{row.samples_per_second:.1f}",
                f"{row.trained_per_second:.1f}" if row.trained_per_second else "",
                "" if share is None else f"{share:.3f}",
                "" if utilization is None else f"{utilization:.1%}",
                f"{row.gpu_gb:.1f}" if row.gpu_gb else "",
                f"{first:.0f} s" if first else "",
            ]
        )
    about = {"GPU": card(), "torch": torch.__version__, **machine.describe()}
    return PAGE.format(
        command=command,
        machine=table(("", ""), about.items()),
        table=table(HEADS, shown),
        notes="\n".join(f"- {note}" for note in notes),
    )


def part(
    name: str, workers: int, arguments: dict[str, dict[str, Any]], jobs: Jobs, seconds: float
) -> list[Row]:
    """Measure one entry of the order. Raises ImportError if it needs a library."""
    model = next(model for model in MODELS if model.name == name)
    missing = [library for library in model.needs if importlib.util.find_spec(library) is None]
    if missing:
        raise ImportError(f"{', '.join(missing)} is not installed")
    if workers:
        return jobs.measure(model, arguments[name], workers)
    return [plain(model, load_task(model.task, arguments[name], TASKS), seconds)]


def arguments_of(folder: Path, *, small: bool) -> dict[str, dict[str, Any]]:
    """Return the arguments of all tasks; those of photos, after they have been written."""
    arguments = {model.name: model.small if small else model.large for model in MODELS}
    if importlib.util.find_spec("PIL"):
        sys.path.insert(0, str(TASKS))
        from photos import write_photos

        count, edge = (64, SMALL_EDGE) if small else (PHOTOS, LARGE_EDGE)
        write_photos(folder, count, edge)
        arguments["resnet-50"] = {**arguments["resnet-50"], "folder": str(folder)}
    return arguments


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [*(model.name for model in MODELS), AUDIT]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each measurement")
    parser.add_argument("--limit", type=float, default=460.0, help="seconds of the whole run")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gpu.md")
    given = parser.parse_args()
    end = time.monotonic() + given.limit
    rows: list[Row] = []
    notes: list[str] = []
    command = f"python benchmarks/gpu.py --seconds {given.seconds:g} --limit {given.limit:g}"
    with ExitStack() as resources:
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="vcasgd-gpu-")))
        (folder / "photos").mkdir()
        arguments = arguments_of(folder / "photos", small=given.small)
        settings = Settings(home=folder / "home", api_port=0, local_capacity=WORKERS)
        state = resources.enter_context(running(settings))
        client = Client(state.api_url, StackHome(settings.home_path).token() or "")
        resources.callback(client.close)
        jobs = Jobs(client, given.seconds)
        for name, workers in ORDER:
            if name not in given.only:
                continue
            title = f"{name}, {workers} workers" if workers else name
            try:
                with time_limit(end - time.monotonic()):
                    if name == AUDIT:
                        notes.append(run_audit())
                        print(notes[-1], flush=True)
                        continue
                    for row in part(name, workers, arguments, jobs, given.seconds):
                        rows.append(row)
                        print(json.dumps(asdict(row)), flush=True)
            except Exception as error:  # noqa: BLE001 - the other parts are worth their time
                notes.append(f"{title}: left out, {error}")
                print(notes[-1], file=sys.stderr, flush=True)
            finally:
                text = page(rows, notes, command)
                if DEVICE == "cuda":
                    given.out.write_text(text)
        print(text)


if __name__ == "__main__":
    main()
