"""The command line against a real API."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.api_harness import Api
from support.command_line import JOB_FILE, Run, stdout_of
from support.fleet_records import machine_row
from support.lines import printed
from support.waiting import PATIENCE

import vcasgd
from vcasgd.cli.output import open_client
from vcasgd.errors import CloudDenied, Unauthorized, VcasgdError
from vcasgd.spec.job import JobState
from vcasgd.stack import PartState, StackHome, StackPhase, StackState


def assert_refused(result: Result, *words: str) -> str:
    """Check for exit status 1 and one error line without a Python traceback; return stderr."""
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output
    for word in words:
        assert word in result.stderr
    return result.stderr


def parsed(result: Result) -> Any:
    return json.loads(stdout_of(result))


# -- finding the API ----------------------------------------------------------------------------


def test_version_option_prints_the_version(bare: Run) -> None:
    assert stdout_of(bare("--version")) == f"vcasgd {vcasgd.__version__}\n"


def test_help_shows_no_type_beside_a_flag(bare: Run) -> None:
    texts = [stdout_of(bare(*words, "--help")) for words in ((), ("logs",), ("token", "create"))]
    assert all("<bool>" not in text and "range>" not in text for text in texts)
    assert "<int> [x>=1]" in texts[1]


def test_help_lists_all_commands_by_their_subjects(bare: Run) -> None:
    text = stdout_of(bare("--help"))
    assert "─ Commands ─" not in text
    assert text.index("─ Stack ─") < text.index("│ token") < text.index("─ Jobs ─")


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (("token", "create", "ann", "--scope", "root"), ": 'root' is not one of"),
        (("up", "--port", "99999"), ": must be less than or equal to 65535"),
        (("evict", "i-1", "--notice", "soon"), ": must be a valid number"),
    ],
)
def test_a_wrong_value_is_named_in_plain_words(
    bare: Run, command: Sequence[str], problem: str
) -> None:
    refused = bare(*command)
    assert (refused.exit_code, problem in refused.stderr) == (2, True), refused.stderr


def test_list_of_jobs_says_why_one_failed(run: Run, api: Api) -> None:
    failed, succeeded = api.submit(), api.submit()
    why = f"the data is damaged: {'x' * 2000}\nand missing"
    api.jobs.transition(failed, JobState.FAILED, [JobState.STARTING], why=why)
    api.finish(succeeded)
    lines = {line.split()[0]: line for line in stdout_of(run("jobs")).splitlines()}
    assert lines[failed].endswith("x and missing")
    assert lines[failed].split()[1] == "failed"
    assert "it succeeded" not in lines[succeeded]
    assert len(lines[succeeded]) < 200


def test_commands_without_a_stack_name_vcasgd_up(bare: Run, tmp_path: Path) -> None:
    for command in ("jobs", "status"):
        assert_refused(bare(command), "there is no stack in", "remedy: start one with: vcasgd up")
    (tmp_path / "home").mkdir()
    # The supervisor was killed, and its parts with it.
    parts = {"api": PartState(pid=1 << 22, ticks=1, ready=True)}
    state = StackState(phase=StackPhase.READY, api_url="http://127.0.0.1:1", parts=parts)
    state.write(tmp_path / "home")
    assert_refused(bare("jobs"), "is not running", "vcasgd up")
    assert not bare("down").stderr
    stopped = bare("status", "--json")
    status = json.loads(stopped.stdout)
    assert (stopped.exit_code, status["phase"]) == (1, "stopped")
    assert not status["parts"][0]["ready"]
    StackState().write(tmp_path / "home")
    assert bare("status").stdout == f"stack in {tmp_path / 'home'}: stopped\n"


def test_missing_or_wrong_token_and_unreachable_api_are_errors(
    bare: Run, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_refused(bare("jobs", "--url", api.url), f"no token for {api.url}", "VCASGD_TOKEN")
    monkeypatch.setenv("VCASGD_TOKEN", "wrong")
    assert_refused(bare("jobs", "--url", api.url), "token")
    nowhere = "http://127.0.0.1:1"
    assert_refused(bare("jobs", "--url", nowhere), f"no answer from {nowhere}", "vcasgd up")
    gateway = nowhere.replace("http:", "https:")
    token = f"vcasgd_ann_{'0' * 64}"
    refused = assert_refused(bare("join", gateway, "--token", token), f"no answer from {gateway}")
    assert "vcasgd up" not in refused, "the stack is elsewhere"


def test_local_token_is_sent_only_to_the_local_stack(bare: Run, tmp_path: Path) -> None:
    home = StackHome(tmp_path / "home")
    home.create()
    home.ensure_token()
    StackState(api_url="http://127.0.0.1:8700").write(home.path)

    open_client("http://127.0.0.1:8700/", None).close()
    with pytest.raises(Unauthorized):
        open_client("http://elsewhere.example:8700", None)


def test_invalid_setting_is_an_error(bare: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VCASGD_HEARTBEAT", "soon")
    assert_refused(bare("jobs"), "VCASGD_HEARTBEAT")


# -- submitting ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (JOB_FILE + "update: {rule: best}", "update.rule: unknown rule 'best'"),
        ("name: [", "is not YAML"),
        ("- 1", "does not contain a job"),
    ],
)
def test_submit_names_the_invalid_field_of_a_job_file(
    run: Run, job_file: Path, text: str, named: str
) -> None:
    job_file.write_text(text)
    assert_refused(run("submit", job_file), str(job_file), named)
    missing = job_file.with_name("none.yaml")
    assert_refused(run("submit", missing), "none.yaml: can't be read")


def test_wrong_arguments_of_submit_are_explained(run: Run, job_file: Path) -> None:
    script = job_file.with_name("train.py")
    assert_refused(run("submit", script), "is a script, not a job file", "task: train.py")
    for option, problem in (("--within", "is not a duration"), ("--finish-by", "must be a time")):
        result = run("submit", job_file, option, "soon")
        assert result.exit_code == 2
        assert f"Invalid value for '{option}'" in result.stderr
        assert problem in " ".join(result.stderr.replace("│", " ").split())


def test_submit_names_the_largest_files_of_a_working_directory_over_the_limit(
    run: Run, job_file: Path
) -> None:
    (job_file.parent / "data.bin").write_bytes(b"x" * 1_200_000)
    assert_refused(run("submit", job_file), "working_dir", "1.0 MB", "data.bin", ".vcasgdignore")


def test_submit_prints_the_job_and_the_next_command(run: Run, api: Api, job_file: Path) -> None:
    text = stdout_of(run("submit", job_file))
    (job,) = api.jobs.active()
    assert text.splitlines() == [
        f"submitted {job}",
        f"packed 2 files (109 bytes) of {job_file.parent}",
        f"follow it with: vcasgd follow {job}",
    ]


def test_a_dry_run_checks_the_job_without_a_stack(bare: Run, job_file: Path) -> None:
    assert stdout_of(bare("submit", job_file, "--dry-run")).splitlines() == [
        f"{job_file} is a valid job; nothing was submitted",
        f"packed 2 files (109 bytes) of {job_file.parent}",
    ]
    shown = parsed(bare("submit", job_file.parent, "--dry-run", "--json", "--set", "epochs=9"))
    assert (shown["epochs"], shown["update"]["rule"]) == (9, "rounds")
    for change, named in (
        ("task=train:Digit", "did you mean Digits?"),
        ("secrets.NO_SUCH={env: NO_SUCH}", "NO_SUCH is not in your environment"),
    ):
        assert_refused(bare("submit", job_file, "--dry-run", "--set", change), named)
    assert_refused(bare("submit", job_file), "there is no stack in")


def test_submit_warns_about_unstable_settings(run: Run, job_file: Path) -> None:
    usual, unusual = run("submit", job_file), run("submit", job_file, "--set", "update.rule=sma")

    assert (usual.exit_code, usual.stderr) == (0, "")
    assert unusual.exit_code == 0
    assert unusual.stderr.startswith("warning: update.rule: short jobs with sma")
    assert "remedy: " in unusual.stderr


def test_submit_with_the_same_key_returns_the_same_job(run: Run, api: Api, job_file: Path) -> None:
    words = ("submit", job_file, "--idempotency-key", "k", "--json")
    assert parsed(run(*words))["id"] == parsed(run(*words))["id"]
    assert len(api.jobs.active()) == 1

    assert_refused(run(*words, "--set", "epochs=3"), "Idempotency-Key", "new key")


def test_set_option_changes_fields(run: Run, job_file: Path) -> None:
    changes = ("epochs=7", "update.rule=async-local-sgd", "args.depth=20", "args.name=x")
    words = [word for change in changes for word in ("--set", change)]
    spec = parsed(run("submit", job_file, *words, "--json"))["spec"]
    assert (spec["epochs"], spec["update"]["rule"]) == (7, "async-local-sgd")
    assert spec["args"] == {"depth": 20, "name": "x"}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("epochs", "must have the form field=value"),
        ("=3", "must have the form field=value"),
        ("epochs=none", "epochs: "),
        ("epochs.first=1", "epochs has no fields"),
        ("args.x=[", "is not YAML"),
    ],
)
def test_set_option_names_an_invalid_change(
    run: Run, job_file: Path, change: str, named: str
) -> None:
    assert_refused(run("submit", job_file, "--set", change), named)


# -- listing ------------------------------------------------------------------------------------


def test_json_option_prints_listings_as_json(run: Run, api: Api) -> None:
    job = api.submit()
    api.start_job(job)
    api.leases(job).renew({"at": time.time(), "machine": "i-1", "steps": 3}, [])
    api.control.publish({"i-1": machine_row()}, {"local": {"machines": 1}})
    checkpoint, _ = api.store_checkpoint(job, 1)
    api.jobs.add_logs(job, "w-1", printed(["hello"]))

    assert [row["id"] for row in parsed(run("jobs", "--json"))] == [job]
    assert parsed(run("jobs", "--state", "failed", "--json")) == []
    assert parsed(run("show", job, "--json"))["state"] == "running"
    assert [row["machine"] for row in parsed(run("workers", "--json"))] == ["i-1"]
    assert [row["name"] for row in parsed(run("workers", job, "--json"))] == ["w-1"]
    assert [row["id"] for row in parsed(run("machines", "--json"))] == ["i-1"]
    assert [row["name"] for row in parsed(run("pools", "--json"))] == ["local"]
    assert [row["name"] for row in parsed(run("checkpoints", job, "--json"))] == [checkpoint]
    assert [row["line"] for row in parsed(run("logs", job, "--json"))] == ["hello"]
    kinds = [row["kind"] for row in parsed(run("events", job, "--json"))]
    assert kinds == ["submitted", "job-running"]
    assert parsed(run("status", "--json"))["platform"]["active_jobs"] == [job]


def test_listings_are_tables_by_default(run: Run, api: Api) -> None:
    job = api.submit()
    api.start_job(job)
    pool = {"machines": 1, "hardware": [{"cpus": 2, "memory_gb": 8}]}
    api.control.publish({"i-1": machine_row()}, {"local": pool})
    checkpoint, _ = api.store_checkpoint(job, 1)
    api.jobs.add_logs(job, f"{job}.i-1", printed(["hello [bold]"]))
    api.leases(job).renew({"pushed_bytes": 1_500_000, "fetched_bytes": 4_000_000_000}, [])

    heading, row = stdout_of(run("jobs")).splitlines()
    assert heading.split()[:2] == ["JOB", "STATE"]
    assert row.split()[:3] == [job, "running", "0/2"]
    assert "running" in (machines := stdout_of(run("machines")))
    assert machines.split()[-1] == "1.0000"
    assert "2 CPUs, 8 GB of memory, no GPU" in stdout_of(run("pools"))
    assert checkpoint in stdout_of(run("checkpoints", job))
    assert re.fullmatch(r"\d\d:\d\d:\d\d  i-1 {11}hello \[bold\]\n", stdout_of(run("logs", job)))
    assert "submitted: digits was submitted" in stdout_of(run("events", job))
    shown = stdout_of(run("show", job))
    assert f"job         {job}\n" in shown
    assert "epoch       1 of 2 (0%)" in shown
    assert "traffic     1.5 MB pushed, 4.0 GB fetched" in shown
    heading, row = stdout_of(run("workers", job)).splitlines()
    assert heading.split()[-2:] == ["PUSHED", "FETCHED"]
    assert "1.5 MB  4.0 GB" in row


def test_a_narrow_terminal_shows_whole_names_and_no_empty_columns(api: Api) -> None:
    job = api.submit(name="a-name-that-is-longer-than-the-terminal-is-wide-in-letters")
    reader, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 60))
    command = [sys.executable, "-m", "vcasgd.cli", "jobs"]
    subprocess.run(command, env={**os.environ, **api.env}, stdout=terminal, check=True)
    text = os.read(reader, 1 << 16).decode()
    os.close(terminal)
    os.close(reader)
    assert job in text
    assert "SUBMITTED" in text
    assert "DEADLINE" not in text


def test_log_lines_are_selected(run: Run, api: Api) -> None:
    job = api.submit()
    api.jobs.add_logs(job, f"{job}.i-1", printed(["Epoch 1", "Epoch 2"]))
    api.jobs.add_logs(job, f"{job}.i-2", printed(["it is hot", "epoch 3"], "warning"))

    def texts(*options: str) -> list[str]:
        return [row["line"] for row in parsed(run("logs", job, "--json", *options))]

    assert texts("--tail", "1") == ["epoch 3"]
    assert texts("--grep", "EPOCH", "--tail", "2") == ["Epoch 2", "epoch 3"]
    assert texts("--worker", "i-1") == ["Epoch 1", "Epoch 2"]
    assert texts("--since", "1h", "--worker", "i-2") == ["it is hot", "epoch 3"]
    assert "i-2  warning  it is hot" in stdout_of(run("logs", job))
    refused = run("logs", job, "--since", "soon")
    assert (refused.exit_code, "not a duration" in refused.output) == (2, True)


def test_text_of_workers_is_printed_as_data(run: Run, api: Api) -> None:
    job = api.submit()
    api.start_job(job)
    hostile = "[/b] \x1b]52;c;eA==\x07 \x1b[2J\u202e[link=x]"
    machine = machine_row(zone=hostile, machine_type=hostile)
    api.control.publish({"i-1": machine}, {"local": {"machines": 1}})
    api.leases(job).renew({"machine": "i-1", "doing": hostile, "device": hostile}, [])
    api.jobs.add_logs(job, f"{job}.i-1", printed([hostile]))

    for command in (
        ("workers",),
        ("workers", job),
        ("machines",),
        ("logs", job),
        ("top", "--once"),
    ):
        shown = stdout_of(run(*command))
        assert not {"\x1b", "\x07", "\u202e"} & set(shown), command
    assert "[/b]  �[link=x]" in stdout_of(run("logs", job))
    assert "[/b]" in stdout_of(run("workers", job))


def test_commands_name_an_unknown_job_or_instance(run: Run) -> None:
    for command in ("show", "follow", "events", "logs", "pause", "checkpoints", "download"):
        assert_refused(run(command, "nothing"), "nothing")
    assert_refused(run("evict", "nothing"), "there is no machine nothing", "vcasgd machines")


def test_a_job_is_found_by_its_name_or_the_start_of_its_id(run: Run, api: Api) -> None:
    job = api.submit()
    assert_refused(run("cancel", ""), "there is no job with an empty name", "remedy: vcasgd jobs")
    assert api.jobs.get(job).state == "starting", "an empty text is no start"
    assert parsed(run("show", "digits", "--json"))["id"] == job
    assert parsed(run("show", job[:-3], "--json"))["id"] == job
    assert_refused(run("show", job[1:]), f"there is no job {job[1:]}")
    longer = api.submit(name="digits-b")
    assert stdout_of(run("cancel", "digits")) == f"{job} is cancelled\n", "a name is no start"

    other = api.submit()

    refused = assert_refused(run("cancel", "digits"), f"{other} (starting)", f"{job} (cancelled)")
    assert longer not in refused
    assert api.jobs.get(other).state == "starting"
    assert_refused(run("cost", "d"), "d can be 3 jobs")
    api.submit(name=other[:-1])
    refused = assert_refused(run("download", other[:-1]), "can be 2 jobs")
    assert other in refused, "a name hides no job of another user"


# -- acting -------------------------------------------------------------------------------------


def test_pause_resume_and_cancel_change_the_state(run: Run, api: Api) -> None:
    job = api.submit()
    assert_refused(run("pause", job), f"job {job} is starting", "remedy:")
    api.start_job(job)
    for command, state in (("pause", "paused"), ("resume", "running"), ("cancel", "cancelled")):
        assert stdout_of(run(command, job)) == f"{job} is {state}\n"
        assert api.jobs.get(job).state == state


def test_set_changes_the_priority_and_the_weight(run: Run, api: Api) -> None:
    job = api.submit()
    text = stdout_of(run("set", job, "priority=high", "weight=2"))
    assert text == f"{job}: priority high, weight 2\n"
    assert "high, weight 2" in stdout_of(run("show", job))
    assert "high, weight 2" in stdout_of(run("jobs"))
    assert stdout_of(run("set", job, "weight=1")) == f"{job}: priority high\n"
    assert_refused(run("set", job, "epochs=9"), "epochs: can't change", "only priority and weight")
    assert_refused(run("set", job, "priority"), "priority: must have the form field=value")
    assert_refused(run("set", job, "priority=top"), "priority", "'high'")


def test_delete_asks_before_it_deletes_a_job(run: Run, api: Api) -> None:
    job = api.submit()
    assert_refused(run("delete", job, "--yes"), f"job {job} has not ended", "vcasgd cancel")
    api.jobs.cancel(job)
    assert run("delete", job).exit_code != 0
    assert api.jobs.get(job).state == "cancelled"
    assert stdout_of(run("delete", job, "--yes")) == f"{job} is deleted\n"
    assert_refused(run("show", job), f"there is no job {job}")


@pytest.fixture
def answering(api: Api) -> Iterator[list[VcasgdError | None]]:
    """A controller that answers each request as the test says, and no other one."""
    answers: list[VcasgdError | None] = []
    stopped = threading.Event()

    def answer() -> None:
        while not stopped.wait(0.02):
            for request, _ in api.control.requests(len(answers)) if answers else ():
                api.control.finish(request, answers.pop(0))

    thread = threading.Thread(target=answer)
    thread.start()
    yield answers
    stopped.set()
    thread.join()


def test_evict_says_what_happened(run: Run, api: Api, answering: list[VcasgdError | None]) -> None:
    job = api.submit()
    worker = f"{job}.i-1"
    api.leases(job, worker).renew({"at": time.time(), "machine": "i-1"}, [])
    api.control.publish({"i-1": {"pool": "local"}}, {})

    answering += [None, None, CloudDenied("no permission", remedy="add it")]
    assert stdout_of(run("evict", worker, "--notice", 30)) == "i-1 is evicted with 30 s notice\n"
    row = parsed(run("evict", "i-1", "--kill", "--json"))
    assert (row["machine"], row["kill"], row["state"]) == ("i-1", True, "done")
    assert_refused(run("evict", "i-1"), "no permission", "remedy: add it")
    assert run("evict", "i-1", "--kill", "--notice", 1).exit_code == 2


def test_evict_fails_if_the_result_is_not_known(run: Run, api: Api) -> None:
    api.control.publish({"i-1": {"pool": "local"}}, {})

    result = run("evict", "i-1", "--timeout", 0.5)

    assert_refused(result, "whether i-1 ends is not known", "vcasgd machines")


def test_download_writes_the_model(run: Run, api: Api, tmp_path: Path) -> None:
    job = api.submit()
    assert_refused(run("download", job), "model")
    name, data = api.store_checkpoint(job, 3)
    api.finish(job, model=name)

    path = Path(stdout_of(run("download", job, "--to", tmp_path)).strip())

    assert path.parent == tmp_path
    assert path.read_bytes() == data
    new = tmp_path / "new" / "folder.safetensors"
    assert stdout_of(run("download", job, "--to", new)).strip() == str(new)
    assert_refused(run("download", job, "--to", new / "model.safetensors"), "folder.safetensors")


def test_an_argument_without_args_is_explained(run: Run, job_file: Path) -> None:
    job_file.write_text(JOB_FILE + "args: {lr: 1e-3}\n")

    result = run("sweep", job_file, "--over", "lr=0.1,0.2")

    assert_refused(result, "changed by lr=0.1", "remedy: did you mean args.lr?")
    for change, remedy in (
        ("epoch=3", "did you mean epochs, or the task's argument args.epoch?"),
        ("momentum=0.9", "did you mean the task's argument args.momentum?"),
        ("workers.mx=3", "did you mean max?"),
        ("args=3", ""),
    ):
        refused = run("submit", job_file, "--set", change)
        assert_refused(refused, f"changed by {change}", remedy)
    both = run("submit", job_file, "--within", "2h", "--finish-by", "2099-01-01")
    assert_refused(both, "finish_by and within are both set; remove one of them")
    assert "did you mean" not in both.output


def test_every_list_shows_the_metrics_of_a_job_without_accuracy(run: Run, api: Api) -> None:
    job = api.submit(epochs=3)
    api.start_job(job)
    api.jobs.add_metrics(job, {"at": 1.0, "loss": 2.34567})
    for epoch, perplexity in enumerate((9.0, 4.0, 5.0), start=1):
        api.evaluate(job, epoch, {"bits": 3.0, "perplexity": perplexity})

    assert "perplexity 4" in stdout_of(run("jobs"))
    shown = stdout_of(run("show", job))
    assert "metrics     perplexity 5, bits 3\n" in shown
    assert "best        perplexity 4 in epoch 2\n" in shown
    assert "perplexity 4" in stdout_of(run("top", "--once"))
    api.finish(job)
    followed = stdout_of(run("follow", job))
    assert "train loss 2.346  perplexity 5  bits 3" in followed
    assert followed.endswith(", best perplexity 4 in epoch 2\n")
    assert "perplexity 4" in stdout_of(run("compare", job))
    # Whether lower values are better is known of usual names
    assert "perplexity 4" in stdout_of(run("compare", job, "--metric", "perplexity"))
    assert "bits 3" in stdout_of(run("compare", job, "--metric", "bits", "--mode", "min"))
    unknown = run("compare", job, "--metric", "bits")
    assert unknown.exit_code == 2
    assert "--mode" in unknown.stderr


def test_download_says_which_model_was_taken(run: Run, api: Api, tmp_path: Path) -> None:
    job = api.submit(epochs=2)
    api.start_job(job)
    files = [api.store_checkpoint(job, epoch, size=epoch) for epoch in (1, 2)]
    api.evaluate(job, 1, {"accuracy": 0.989})
    api.evaluate(job, 2, {"accuracy": 0.976})
    api.finish(job, model=files[1][0])
    target = tmp_path / "model"

    taken = run("download", job, "--to", target)
    assert target.read_bytes() == files[0][1]
    assert taken.stderr == (
        "this is the best model, of epoch 1: accuracy 98.90%; "
        "--last takes the last model, of epoch 2: accuracy 97.60%\n"
    )
    assert "the last model, of epoch 2" in run("download", job, "--to", target, "--last").stderr
    assert target.read_bytes() == files[1][1]
    first = "this is the best model, of epoch 1: accuracy 98.90%"
    for name in ("1", "best", files[0][0]):
        assert first in run("download", job, "--to", target, "--checkpoint", name).stderr
        assert target.read_bytes() == files[0][1]
    refused = run("download", job, "--to", target, "--checkpoint", "7")
    assert_refused(refused, "has no checkpoint 7")
    assert run("download", job, "--best", "--last").exit_code == 2
    listed = stdout_of(run("checkpoints", job)).splitlines()
    assert ["best" in listed[1], "last" in listed[2]] == [True, True]


def test_several_jobs_are_cancelled_and_deleted(run: Run, api: Api) -> None:
    first, second, third, over = (api.submit() for _ in range(4))
    api.start_job(over), api.account(over, 10, 1)
    api.finish(over)

    assert stdout_of(run("cancel", first, second)) == (
        f"{first} is cancelled\n{second} is cancelled\n"
    )
    everything = ("cancel", "--all", "--state", "starting")
    asked = run(*everything)
    assert (asked.exit_code, f"Cancel {third}?" in asked.stderr) == (1, True)
    assert stdout_of(run(*everything, "--yes")) == f"{third} is cancelled\n"
    assert run("cancel", "--all").stderr == "no jobs\n"
    for command in (("cancel", "--all"), ("jobs",)):
        refused = run(*command, "--state", "pasued")
        assert (refused.exit_code, "did you mean paused?" in refused.output) == (2, True)
    for words in ((), ("--all", first), (first, "--state", "running")):
        assert run("cancel", *words).exit_code == 2
    assert_refused(run("pause", first), "remedy: submit it again")
    assert_refused(run("extend", first, "--epochs", "+5"), "remedy: submit a job with start_from")
    assert "must be a number such as +5" in run("extend", over, "--epochs", "x").output
    running, other = api.submit(), api.submit()
    api.start_job(running), api.start_job(other)
    result = run("pause", first, running)
    assert (result.exit_code, result.stdout) == (1, f"{running} is paused\n"), "the others are"
    assert stdout_of(run("pause", "--all")) == f"{other} is paused\n"
    assert run("resume", running, "--max-cost-usd", "0").exit_code == 2
    assert len(stdout_of(run("resume", "--all", "--state", "paused")).splitlines()) == 2
    api.finish(running), api.finish(other)
    run("delete", "--all", "--state", "cancelled", "--yes")
    assert {row["id"] for row in parsed(run("jobs", "--json"))} == {over, running, other}


def test_ctrl_c_while_the_command_starts_shows_no_traceback(home: Path) -> None:
    # It says of each module that it has imported, which most of the start consists of.
    command = [sys.executable, "-X", "importtime", "-m", "vcasgd.cli", "jobs"]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        while not process.stderr.readline().endswith(" typer\n"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=PATIENCE)
    assert "Traceback" not in stderr
    assert process.returncode == 130


def test_tokens_are_created_listed_and_revoked(run: Run, api: Api) -> None:
    created = run("token", "create", "ann", "--scope", "submit", "--max-machines", 2,
                  "--expires", "30d")  # fmt: skip
    assert "token for ann, scope submit; it is not shown again" in created.stderr
    text = created.stdout.strip()
    with api.http(text) as http:
        assert http.get("me").json()["name"] == "ann"

    heading, row = stdout_of(run("token", "list")).splitlines()
    assert heading.split()[:3] == ["NAME", "SCOPE", "MACHINES"]
    assert row.split()[:3] == ["ann", "submit", "2"]
    assert row.split()[-3:] == ["in", "30", "d"]
    assert_refused(run("jobs", "--token", "x"), "the bearer token is missing or wrong", "--token")
    assert_refused(run("token", "list", "--token", text), "scope admin; ann has scope submit")
    assert stdout_of(run("token", "revoke", "ann")) == "the token ann is revoked\n"
    assert_refused(run("jobs", "--token", text), "bearer token")
    assert_refused(run("token", "create", "Ann", "--scope", "read"), "name")
