"""Scripts of machines on Google Cloud, on a small fake of the APIs that they use.

There is no emulator of Google Cloud. The fake serves real HTTP.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

from support.fake_google import FakeGoogle
from support.fake_google import GoogleMachine as Machine
from support.machine_roots import INFRA, run_failing_boot
from support.waiting import PATIENCE, await_truth


def test_secrets_are_generated_once_and_read_by_the_store(
    google: FakeGoogle, tmp_path: Path
) -> None:
    control = Machine(tmp_path / "control", google, "control-plane")
    store = Machine(tmp_path / "store", google, "store")
    # When the control plane starts twice, and a store node once
    for machine in (control, control, store):
        done = machine.run("secrets")
        assert done.returncode == 0, done.stderr
    # Then they have the same passwords
    assert set(google.secrets) == {
        f"mine-{name}" for name in ("servers", "api-token", "ray-token", "job-secrets")
    }
    passwords = json.loads(google.secrets["mine-servers"])
    secrets = control.secrets()
    assert secrets["VCASGD_LEDGER_URL"] == f"redis://:{passwords['ledger']}@10.0.0.10:6379/0"
    assert secrets["VCASGD_TENSORS_URL"].split() == [
        f"redis://:{passwords['tensors']}@10.0.0.{number}:6380/0" for number in (20, 21)
    ]
    assert secrets["VCASGD_TOKEN"] == google.secrets["mine-api-token"]
    assert secrets["VCASGD_SECRETS_KEY"] == google.secrets["mine-job-secrets"]
    assert "VCASGD_SECRETS_KEY" not in store.secrets()
    assert store.secrets()["VCASGD_JOB_SECRET"] == secrets["VCASGD_JOB_SECRET"] == passwords["jobs"]
    assert (
        f"requirepass {passwords['tensors']}"
        in (tmp_path / "store/run/vcasgd/tensors.conf").read_text()
    )


def test_managed_redis_uses_the_password_of_google(google: FakeGoogle, tmp_path: Path) -> None:
    path = "projects/a-project/locations/us-central1/instances/mine-ledger"
    machine = Machine(tmp_path / "control", google, "control-plane", redis=path)
    done = machine.run("secrets")
    assert done.returncode == 0, done.stderr
    assert machine.secrets()["VCASGD_LEDGER_URL"] == "rediss://:made-by-google@10.0.0.3:6378/0"
    assert "VCASGD_JOB_SECRET" not in machine.secrets()


def test_change_to_managed_redis_and_back_changes_the_password(
    google: FakeGoogle, tmp_path: Path
) -> None:
    # Given a cluster with a ledger of its own
    path = "projects/a-project/locations/us-central1/instances/mine-ledger"
    first = Machine(tmp_path / "first", google, "control-plane")
    assert first.run("secrets").returncode == 0
    # When machines with managed Redis replace its own, then a store node waits for the new secret
    control = Machine(tmp_path / "control", google, "control-plane", redis=path)
    store = Machine(tmp_path / "store", google, "store", redis=path)
    assert store.run("secrets").returncode != 0
    for machine in (control, store):
        done = machine.run("secrets")
        assert done.returncode == 0, done.stderr
        # And both use Google's password, and the old ones of the other servers
        changed = machine.secrets()
        assert changed["VCASGD_LEDGER_URL"] == "rediss://:made-by-google@10.0.0.3:6378/0"
        assert changed["VCASGD_TENSORS_URL"] == first.secrets()["VCASGD_TENSORS_URL"]
    # And the same on the way back
    store = Machine(tmp_path / "last", google, "store")
    assert store.run("secrets").returncode != 0
    assert first.run("secrets").returncode == 0
    assert store.run("secrets").returncode == 0
    assert store.secrets()["VCASGD_LEDGER_URL"] == first.secrets()["VCASGD_LEDGER_URL"]


def test_unreadable_secret_is_not_replaced(google: FakeGoogle, tmp_path: Path) -> None:
    google.secrets["mine-servers"] = "{}"
    google.broken = True
    done = Machine(tmp_path / "control", google, "control-plane").run("secrets")
    assert done.returncode != 0
    assert "secret mine-servers: status 403" in done.stderr
    assert google.secrets == {"mine-servers": "{}"}


def test_the_unit_of_the_secrets_outlives_an_outage(google: FakeGoogle, tmp_path: Path) -> None:
    # Given its command on a machine that starts while the cloud answers nothing
    google.broken = True
    machine = Machine(tmp_path / "control", google, "control-plane")
    unit = (INFRA / "systemd/vcasgd-secrets.service").read_text().replace("\\\n", " ")
    command = next(line for line in unit.splitlines() if line.startswith("ExecStart="))
    library = "/usr/local/lib/vcasgd"
    for text, here in {
        library: machine.root / library[1:],
        "sleep 30": "sleep 0.1",
        "%n": "a",
    }.items():
        command = command.replace(text, str(here))
    argv = shlex.split(command.removeprefix("ExecStart="))
    with subprocess.Popen(argv, env=machine.environment, stderr=subprocess.DEVNULL) as process:
        # When it has said so, and the cloud answers
        await_truth(lambda: google.attributes.get("vcasgd/boot-error", "").endswith("tries again"))
        assert process.poll() is None
        google.broken = False
        # Then it ends with all secrets
        assert process.wait(PATIENCE) == 0
    assert machine.secrets()["VCASGD_TOKEN"]


def test_objects_and_failures_are_stored(google: FakeGoogle, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "worker", google, "worker")
    file = tmp_path / "wheel.whl"
    done = machine.shell(f"fetch_object gs://a-bucket/release/wheel.whl {file}")
    assert done.returncode == 0, done.stderr
    assert file.read_bytes() == b"a wheel"
    assert machine.shell(f"fetch_object gs://a-bucket/release/other {file}").returncode != 0
    done = machine.shell(f"store_object {file} gs://a-bucket/control/api.pem")
    assert google.objects["control/api.pem"] == b"a wheel"
    # And failures appear in the attributes of the machine
    assert machine.run("unit-failed", "vcasgd-worker.service").returncode == 0
    said = google.attributes["vcasgd/boot-error"]
    assert said.startswith("worker: vcasgd-worker.service was given up")


def test_failed_boot_step_is_reported_to_google(google: FakeGoogle, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "worker", google, "worker")
    done = run_failing_boot(machine.root, {"VCASGD_METADATA_URL": google.url})
    assert done.returncode == 1
    assert google.attributes["vcasgd/boot-error"] == "worker: step add_user failed (status 1)"
