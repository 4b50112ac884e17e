"""A name service (DNS) that fails for one worker."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest
from support.harness import Harness
from support.missing import skip_here
from support.training import Training
from support.waiting import await_truth

#: Seconds; a lease is eight heartbeats.
HEARTBEAT = 0.5
LEASE = 8 * HEARTBEAT


class NameService:
    """Files that replace ``/etc/hosts`` and ``/etc/resolv.conf`` in a mount namespace of a process.

    Skips the test without the right to create one, but not in CI.
    """

    #: Resolves to this computer while the names are published; no name server answers.
    NAME = "store.vcasgd.test"

    def __init__(self, folder: Path) -> None:
        self._hosts, resolver = folder / "hosts", folder / "resolv.conf"
        resolver.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        self.publish()
        script = (
            f"mount --bind {self._hosts} /etc/hosts && "
            f'mount --bind {resolver} /etc/resolv.conf && exec "$@"'
        )
        #: The command that runs another one with these files.
        self.under = ["unshare", "--mount", "sh", "-c", script, "sh"]
        if reason := self._obstacle():
            skip_here(reason)

    def publish(self) -> None:
        self._hosts.write_text(f"127.0.0.1 localhost {self.NAME}\n")

    def fail(self) -> None:
        """Make all names but ``localhost`` unknown."""
        self._hosts.write_text("127.0.0.1 localhost\n")

    def _obstacle(self) -> str | None:
        if shutil.which("unshare") is None:
            return "unshare is not installed (Debian: apt install util-linux)"
        done = subprocess.run([*self.under, "true"], capture_output=True, text=True, check=False)
        return f"no mount namespaces: {done.stderr}" if done.returncode else None


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("harness", [HEARTBEAT], indirect=True)
def test_a_worker_whose_names_do_not_resolve_goes_on_when_they_do(harness: Harness) -> None:
    names = NameService(harness.home)

    # Given two workers, one of which knows its servers by name
    training = Training(harness, samples=12_000, epochs=1, subtasks=120)
    harness.start_server()
    harness.start_job_loop()
    urls = {
        name: harness.env[name].replace("127.0.0.1", names.NAME)
        for name in ("VCASGD_LEDGER_URL", "VCASGD_TENSORS_URL")
    }
    victim = harness.start_worker(training.job, under=names.under, fresh_env=urls)
    (other,) = training.add_workers(1)
    for name in (victim, other):
        training.await_steps(name, 3)

    # When it loses its connections while names don't resolve, for longer than two leases
    names.fail()
    for server in (harness.ledger, harness.tensors):
        server.connection.client_kill_filter(_type="normal", skipme=True)
    failed_at = time.time()
    while (training.heartbeat(other).at or 0.0) < failed_at + 2 * LEASE:
        training.await_steps(other, len(training.steps_of(other)) + 1)
    beat = training.heartbeat(victim).at or 0.0
    assert beat < failed_at + HEARTBEAT, "the fault fired: it has no connection"
    names.publish()
    published_at = time.time()

    await_truth(lambda: (training.heartbeat(victim).at or 0.0) > published_at)
    training.await_steps(victim, len(training.steps_of(victim)) + 3)
    assert training.worker(victim).alive
    training.await_success()
