"""Generated histories of workers, parameter servers and lost servers keep all guarantees.

They are diverse enough to detect a missing check.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from support.histories import REPLACED, History, faulty_servers
from support.servers import KINDS

from vcasgd.parameter_server import shard
from vcasgd.store import connection
from vcasgd.store.connection import script_source

COMMIT_FENCE = "tonumber(held) ~= tonumber(token)"
PUSH_TOKEN = "seen > tonumber(ARGV[5])"
PUSH_POSITION = "position ~= tonumber(ARGV[3])"


@pytest.fixture(autouse=True)
def _regular_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the commands of a turn independent of time."""
    monkeypatch.setattr(shard, "UPKEEP_SECONDS", 0.0)


@pytest.mark.ci
@pytest.mark.parametrize("kind", KINDS)
def test_any_history(kind: str, tmp_path: Path) -> None:
    with faulty_servers(kind, tmp_path) as History.servers:
        run_state_machine_as_test(
            History,
            settings=settings(
                max_examples=settings.default.max_examples // 3,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


@pytest.mark.parametrize(
    ("script", "check", "violation"),
    [
        pytest.param(
            *("tensors/commit", COMMIT_FENCE, REPLACED),
            id="the fence of servers",
            marks=pytest.mark.extended,
        ),
        pytest.param(
            *("tensors/push", PUSH_TOKEN, "a stale lease pushes nothing"),
            id="the token of a lease",
        ),
        pytest.param(
            *("tensors/push", PUSH_POSITION, "a push is accepted where it continues its subtask"),
            id="the position of a subtask",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_a_missing_check_is_found(
    script: str, check: str, violation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the same histories with one comparison removed from one script."""
    whole = script_source(script)
    assert whole.count(check) == 1
    weak = whole.replace(check, "false")
    monkeypatch.setattr(
        connection, "script_source", lambda name: weak if name == script else script_source(name)
    )
    monkeypatch.setattr(History, "runs_to_end", False)

    with (
        faulty_servers("valkey", tmp_path) as History.servers,
        pytest.raises(AssertionError, match=violation),
    ):
        run_state_machine_as_test(
            History,
            settings=settings(
                max_examples=200,
                stateful_step_count=30,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                report_multiple_bugs=False,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
