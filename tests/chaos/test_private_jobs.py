"""A job with secrets, packages, and setup commands on a whole stack.

Its task shows its secrets.
"""

from __future__ import annotations

import hashlib
import secrets
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.harness import AUDIT_TASK
from support.secret_search import answers, forms, in_files, in_processes
from support.stacks import server_url
from support.training import TASKS
from support.waiting import PATIENCE
from support.wheels import write_wheel

from vcasgd.chaos.audited_job import counting_spec
from vcasgd.client import Client, Job
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.stack import StackHome, StackState, running
from vcasgd.store.connection import connect
from vcasgd.store.keys import LedgerKeys

pytestmark = [pytest.mark.slow, pytest.mark.ci]

TOKEN, LINE = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
DIGEST = f"digest {hashlib.sha256(TOKEN.encode()).hexdigest()} hello"


def private_job(folder: Path) -> JobSpec:
    code = folder / "code"
    code.mkdir()
    key = folder / "key.pem"
    key.write_text(f"-----BEGIN-----\n{LINE}\n-----END-----\n")
    for source in (TASKS / "private.py", AUDIT_TASK / "audit.py"):
        (code / source.name).write_text(source.read_text())
    write_wheel(code / "wheels", "greeting", "1.0", "text = 'hello'")
    (code / "requirements.txt").write_text("--no-index\n--find-links wheels\ngreeting\n")
    fields = counting_spec(1).model_dump(mode="json")
    fields["args"]["step_seconds"] = 0.0
    return JobSpec.parse(
        {
            **fields,
            "name": "private",
            "task": "private:Private",
            "working_dir": str(code),
            "workers": {"max": 1},
            "env": {"PLAIN": "shown"},
            "secrets": {"API_TOKEN": {"env": "MY_TOKEN"}, "PEM": {"file": str(key)}},
            "requirements": "requirements.txt",
            "setup": ["echo $PLAIN > made-by-setup", "echo $API_TOKEN"],
        }
    )


def responses(client: Client, url: str, tokens: list[str], jobs: list[Job]) -> list[bytes]:
    """Return what the API answers to these tokens, on every route that reads about these jobs."""
    shown = []
    for job in jobs:
        values = {"job": job.id, "digest": job.package or ""}
        if stored := client.job(job.id).checkpoints():
            values["checkpoint"] = stored[-1].name
        for token in tokens:
            shown += list(answers(url, token, values))
    assert sum(status == 200 for _, status, _ in shown) > 50, "most of the API answered"
    return [body for _, _, body in shown]


def test_secrets_are_nowhere_but_in_the_jobs_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = StackHome(tmp_path / "home")
    settings = Settings(home=home.path, api_port=0, local_capacity=2, log_format="json")
    with running(settings), ExitStack() as clients:
        state, admin = StackState.read(home.path), home.token() or ""
        client = clients.enter_context(Client(state.api_url, admin))
        # Given a job, and one that fails with a secret in its error
        spec = private_job(tmp_path)
        failing = spec.model_copy(update={"args": {**spec.args, "fails": True}})
        monkeypatch.setenv("MY_TOKEN", TOKEN)
        submitted = [client.submit_directory(each).id for each in (spec, failing)]
        monkeypatch.delenv("MY_TOKEN")

        done, failed = (client.job(job).wait(PATIENCE) for job in submitted)

        # Then the task got its secrets, its package, and its file, and its output lacks the values
        assert done.state == "succeeded", (done.reason, done.traceback)
        logs = [row.line for row in client.job(done.id).logs()]
        for line in (
            DIGEST,
            "token *** lines ['***', '***', '***']",
            "https://user:***@example.com",
        ):
            assert line in logs
        assert in_files(Path(state.scratch), "authorised by ***"), "Ray's logs are searched"
        assert "401 for ***" in f"{failed.reason}"
        assert "401 for ***" in f"{failed.traceback}"
        # And nothing else has the values: no store, log, page, response, or process
        reader = client.create_token("reader", "read").token
        bodies = responses(client, state.api_url, [reader, admin], [done, failed])
        assert any(b"MY_TOKEN" in body for body in bodies), "a variable's name is no secret"
        assert in_files(home.path, DIGEST), "the search finds what is there"
        for secret in (TOKEN, LINE):
            assert in_files(home.path, secret) == []
            assert in_files(Path(state.scratch), secret) == []
            assert in_processes(home.path, secret) == []
            assert [body for body in bodies if any(form in body for form in forms(secret))] == []
        # And the encrypted ones ended with the jobs
        ledger = connect(server_url(home, "ledger"))
        assert ledger.exists(*(LedgerKeys(job).secrets for job in submitted)) == 0
        ledger.close()
