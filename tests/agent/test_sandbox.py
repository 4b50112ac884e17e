"""Sandbox of workers, without a stack: real bubblewrap, and programs that try to break out."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.children import Process
from support.processes import read_each, run_program
from support.sandboxes import FILES, working_sandbox
from support.waiting import await_truth

from vcasgd.agent.agent import Display
from vcasgd.agent.availability import Availability, StackSilence, Terms
from vcasgd.agent.sandbox import SandboxMode, choose, make_sandbox
from vcasgd.agent.worker_process import SERVERS, JoinedWorker
from vcasgd.child_process import visible
from vcasgd.cli.output import PlainConsole
from vcasgd.errors import SpecError, StackError
from vcasgd.machine.workers import MAX_LOG_BYTES
from vcasgd.schemas.joining import OrderView
from vcasgd.worker.job_environment import NETWORK_REMEDY


def run_inside(
    program: str, *arguments: str, inside: dict[Path, Path] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a Python program in a sandbox."""
    argv = [sys.executable, "-c", program, *arguments]
    return run_program(working_sandbox(**options).command(argv, inside))


def error_of(program: str, *arguments: str, **options: Any) -> str:
    """Run a program that has to fail, and return its error."""
    done = run_inside(program, *arguments, **options)
    assert done.returncode != 0, done.stdout
    return done.stderr.strip().splitlines()[-1]


READ = "import sys; print(open(sys.argv[1]).read())"
#: Opens files, and prints what becomes of each attempt.
OPEN = """
import os, sys
for path in sys.argv[2:]:
    try:
        os.open(path, int(sys.argv[1]))
        print("opened")
    except OSError as error:
        print(error.strerror)
"""


def opened(flags: int, *paths: str | Path, **options: Any) -> list[str]:
    """Return what happens in a sandbox to attempts to open files."""
    done = run_inside(OPEN, str(flags), *map(str, paths), **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


class TestFiles:
    def test_files_of_the_owner_are_not_there(self, tmp_path: Path) -> None:
        secret = tmp_path / "id_ed25519"
        secret.write_text("secret")

        files = (secret, Path.home() / ".bashrc", "/etc/shadow")
        assert opened(os.O_RDONLY, *files) == ["No such file or directory"] * 3

    def test_nothing_but_the_temporary_folder_is_writable(self) -> None:
        folders = ("/", "/usr", "/etc", "/dev", "/run/vcasgd", sys.prefix, "/proc/sys/kernel")
        created = opened(os.O_WRONLY | os.O_CREAT, *(f"{each}/escaped" for each in folders))
        assert len(created) == len(folders)
        assert "opened" not in created, created
        # root could open it, even without a capability
        assert opened(os.O_WRONLY, "/proc/sys/kernel/core_pattern") != ["opened"]

        done = run_inside("import pathlib; pathlib.Path.cwd().joinpath('own').write_text('x')")
        assert done.returncode == 0, done.stderr
        assert not Path("/tmp/own").exists(), "it is a file system of its own"

    def test_shared_folders_can_be_read_only(self, tmp_path: Path) -> None:
        data = tmp_path / "data"
        data.write_text("rows")

        done = run_inside(READ, str(data), shared=[tmp_path])
        assert done.stdout == "rows\n", done.stderr
        assert opened(os.O_WRONLY, data, shared=[tmp_path]) == ["Read-only file system"]

    def test_home_can_not_be_shared(self) -> None:
        for folder in (Path.home(), Path("/")):
            with pytest.raises(SpecError, match="contains your home folder"):
                make_sandbox([0], None, None, [folder])

    @pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
    def test_files_have_a_limit(self, folder: str) -> None:
        fill = (
            "import sys\n"
            "for number in range(40):\n"
            "    open(f'{sys.argv[1]}/{number}', 'wb').write(bytes(10_000_000))\n"
        )
        assert FILES == "100MB"
        assert "No space left on device" in error_of(fill, folder)

    def test_log_has_a_limit(self, tmp_path: Path) -> None:
        sandbox = working_sandbox()
        program = "while True: print('x' * 1_000_000)"
        with (tmp_path / "log").open("wb") as log:
            done = subprocess.run(
                sandbox.command([sys.executable, "-c", program]),
                stdout=log,
                stderr=subprocess.DEVNULL,
                check=False,
                timeout=120,
            )
        assert done.returncode != 0
        assert (tmp_path / "log").stat().st_size <= sandbox.files


class TestProcesses:
    def test_other_processes_are_invisible(self) -> None:
        program = "import os; print(*sorted(map(int, filter(str.isdigit, os.listdir('/proc')))))"
        assert run_inside(program).stdout == "1 2\n"
        assert "ProcessLookupError" in error_of(f"import os; os.kill({os.getpid()}, 0)")

    def test_there_are_no_privileges_and_no_namespaces(self) -> None:
        status = run_inside("print(open('/proc/self/status').read())").stdout
        for line in ("CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1"):
            assert line in status
        # CLONE_NEWUSER
        program = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x10000000) != 0)"
        assert run_inside(program).returncode == 1

    def test_processes_are_few_of_low_priority_and_the_first_to_be_killed(self) -> None:
        program = """
import os, resource, json
score = int(open('/proc/self/oom_score_adj').read())
limits = [resource.getrlimit(each)[1] for each in (resource.RLIMIT_NPROC, resource.RLIMIT_CORE)]
print(json.dumps([os.nice(0), score, len(os.sched_getaffinity(0)), *limits]))
"""
        nice, score, processors, processes, core = json.loads(run_inside(program).stdout)
        assert nice >= 10
        assert (score, processors, processes, core) == (1000, 1, 4096, 0)

    def test_everything_ends_with_the_agent(self, tmp_path: Path) -> None:
        # Given a program in a sandbox, which has left its session, and the process that started it
        sleeper = "import os, time; os.fork() or os.setsid(); time.sleep(600)"
        argv = working_sandbox().command([sys.executable, "-c", sleeper, "sleeper"])
        start = f"import subprocess; subprocess.run({argv!r})"
        agent = Process([sys.executable, "-c", start], tmp_path / "log")
        here = psutil.Process(agent.pid)
        await_truth(lambda: _sleepers(here) == 2)
        boxed = here.children(recursive=True)

        agent.kill()

        await_truth(lambda: not any(each.is_running() for each in boxed))


def _sleepers(agent: psutil.Process) -> int:
    names = read_each(agent.children(recursive=True), psutil.Process.name)
    return len([name for name in names if name.startswith("python")])


class TestNetwork:
    CONNECT = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5)"

    def test_no_port_of_this_machine_is_reachable(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
            assert "ConnectionRefusedError" in error_of(self.CONNECT, port)
            assert run_inside(self.CONNECT, port, network=True).returncode == 0

    def test_no_other_address_is_reachable(self) -> None:
        program = "import socket; socket.create_connection(('192.0.2.7', 443), 5)"
        assert "Network is unreachable" in error_of(program)

    def test_sockets_that_lead_to_servers_are_reachable(self, tmp_path: Path) -> None:
        place = Path("/run/vcasgd/servers")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(tmp_path / "ledger"))
            server.listen()
            connect = f"import socket; socket.socket(socket.AF_UNIX).connect('{place}/ledger')"
            assert run_inside(connect, inside={place: tmp_path}).returncode == 0

    def test_a_command_that_fails_for_want_of_a_network_names_the_remedy(self) -> None:
        code = (
            "import pathlib; from vcasgd.worker.job_environment import run_command; "
            "run_command(['false'], 'requirements', pathlib.Path(), {}, 60, lambda: None, 0)"
        )
        folder = Path(__file__).parents[2] / "vcasgd"
        shared = {"shared": [folder]}
        program = f"import sys; sys.path.insert(0, {str(folder.parent)!r}); {code}"

        assert error_of(program, **shared).endswith(f"ended with status 1 ({NETWORK_REMEDY})")
        assert error_of(program, network=True, **shared).endswith("ended with status 1")


def test_output_of_a_worker_takes_bounded_space(tmp_path: Path) -> None:
    sandbox = working_sandbox()
    box = replace(sandbox, files=4 * MAX_LOG_BYTES)
    order = OrderView(worker="job.m", start="1", job="job", name="job", package="0" * 64, env={})
    (tmp_path / "code" / order.package).mkdir(parents=True)
    processors = list(box.processors)
    (tmp_path / SERVERS).mkdir()
    terms = Terms(Availability(), None, StackSilence(), processors, visible(os.environ), box)
    worker = JoinedWorker(order, tmp_path, terms, 1.0, lambda *_: None)
    await_truth(lambda: worker.update() or worker.ended is not None)
    log = tmp_path / "1.log"
    with log.open("ab") as end:
        end.truncate(MAX_LOG_BYTES + 1)
    worker._next_look = 0.0
    worker.update()
    assert log.stat().st_size == 0

    worker.remove()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["code", SERVERS]


class TestChoice:
    def test_without_bubblewrap_a_machine_joins_only_if_its_owner_wants_no_sandbox(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sandbox = make_sandbox([0], None, None)
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(StackError, match="no sandbox: there is no bwrap") as refused:
            choose(SandboxMode.REQUIRE, sandbox, 0)
        assert "install bubblewrap" in str(refused.value.remedy)
        assert "use --sandbox off" in str(refused.value.remedy)
        used, line = choose(SandboxMode.OFF, sandbox, 0)
        assert used is None
        assert line == "no sandbox: jobs can do all that you can do on this machine"

    def test_gpus_that_it_hides_are_a_reason_against_it(self) -> None:
        assert working_sandbox().why_not(1_000) is not None

    def test_sizes_are_checked(self) -> None:
        for text in ("much", "0", "-1GB"):
            with pytest.raises(SpecError, match="is not a size") as refused:
                make_sandbox([0], text, None)
            assert refused.value.field == "max-memory"


def test_texts_of_jobs_do_not_control_the_terminal() -> None:
    output = io.StringIO()
    Display(PlainConsole(file=output)).event("failed: \x1b]52;c;Y3VybA==\x07[red]x")
    assert "\x1b" not in output.getvalue()
    assert "[red]x" in output.getvalue()


def test_orders_set_no_variable_of_the_programs_that_start_a_sandbox() -> None:
    order = {"worker": "w", "start": "1", "job": "j", "name": "n", "package": "0" * 64}
    OrderView.model_validate({**order, "env": {"VCASGD_LEDGER_URL": "x"}})
    for wrong in (
        {"env": {"LD_PRELOAD": "/proc/self/cwd/code/x.so"}},
        {"env": {}, "start": "../x"},
        {"env": {}, "package": "../.."},
    ):
        with pytest.raises(ValueError, match="String should match pattern"):
            OrderView.model_validate({**order, **wrong})
