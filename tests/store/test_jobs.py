"""Jobs in the ledger: submission, transitions, history, servers, and the controller."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from support.lines import printed
from support.waiting import PATIENCE, await_truth
from support.world import spec_of

from vcasgd.errors import Cause, Conflict, NotFound
from vcasgd.learning.evaluation import EvaluationPoints
from vcasgd.learning.subtasks import EpochPlan
from vcasgd.store import keys as names
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger import events as history
from vcasgd.store.ledger import jobs as jobs_module
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.job import Failure, JobRecord, JobState, ModelFacts
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.servers import NONCE_BITS, Servers

PACKAGE = "a" * 64
ENDED = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


@pytest.fixture
def jobs(ledger: RedisClient) -> Jobs:
    return Jobs(ledger)


@pytest.fixture
def job(jobs: Jobs) -> str:
    return jobs.submit(spec_of(), PACKAGE).id


def in_state(jobs: Jobs, state: JobState) -> str:
    job = jobs.submit(spec_of(), PACKAGE).id
    assert jobs.transition(job, state, JobState, why="test")
    return job


def report_facts(ledger: RedisClient, job: str) -> None:
    """Store facts like a worker that creates the first snapshot."""
    facts = ModelFacts(samples=10, validation_samples=1, layout="[]", order_digest="d")
    ledger.hset(LedgerKeys(job).facts, "facts", json.dumps(facts.to_dict()))


def kinds(events: Iterable[dict[str, Any]]) -> list[str]:
    return [event["kind"] for event in events]


class TestSubmit:
    def test_a_new_job_has_all_submitted_fields(self, jobs: Jobs) -> None:
        start = time.time()
        spec = spec_of(name="cifar", epochs=4, update={"rule": "vc-asgd", "alpha": 0.9})

        job = jobs.submit(spec, PACKAGE)

        assert job.id.startswith("cifar-")
        assert (job.spec, job.package, job.state) == (spec, PACKAGE, JobState.STARTING)
        assert (job.version, job.finished_epochs, job.totals, job.evaluations) == (0, 0, {}, ())
        assert {job.started_at, job.ended_at, job.reason, job.facts, job.best} == {None}
        assert start <= job.created_at <= time.time()
        assert jobs.work(job.id) == {
            "next": 0, "finished": 0, "total": 12, "per_epoch": 3, "lead": 1,
        }  # fmt: skip
        assert kinds(jobs.events(job.id)) == ["submitted"]
        assert jobs.active() == [job.id]

    def test_subtasks_of_a_job_that_sets_none_are_known_once_its_plan_is(self, jobs: Jobs) -> None:
        job = jobs.submit(spec_of(subtasks_per_epoch=None), PACKAGE).id
        assert jobs.work(job) == {"next": 0, "finished": 0, "lead": 1}

        plan = EpochPlan(samples=10, subtasks_per_epoch=5, epochs=2, seed=0)
        jobs.set_plan(job, EvaluationPoints(plan, None))

        work = jobs.work(job)
        assert (work["total"], work["per_epoch"]) == (10, 5)

    @pytest.mark.parametrize(
        ("spec", "package"), [(spec_of(epochs=9), PACKAGE), (spec_of(), "b" * 64)]
    )
    def test_the_same_key_for_another_body_is_a_conflict(
        self, jobs: Jobs, spec: Any, package: str
    ) -> None:
        jobs.submit(spec_of(), PACKAGE, "key")

        with pytest.raises(Conflict) as caught:
            jobs.submit(spec, package, "key")

        assert caught.value.status == 409
        assert len(jobs.all()) == 1


class TestTransitions:
    def test_an_allowed_transition_records_an_event(self, jobs: Jobs, job: str) -> None:
        assert jobs.transition(
            job, JobState.RUNNING, [JobState.STARTING], why="facts are known", started_at=12.5
        )

        after = jobs.get(job)
        assert (after.state, after.reason, after.started_at) == (
            JobState.RUNNING, "facts are known", 12.5,
        )  # fmt: skip
        event = jobs.events(job)[-1]
        assert (event["kind"], event["text"]) == ("job-running", "facts are known")

    def test_a_transition_that_is_not_allowed_changes_nothing(self, jobs: Jobs) -> None:
        job = in_state(jobs, JobState.PAUSED)
        before, events = jobs.get(job), jobs.events(job)

        assert not jobs.transition(
            job, JobState.FINISHING, [JobState.RUNNING], why="no", final_evaluation=3, model="m"
        )

        assert jobs.get(job) == before
        assert jobs.events(job) == events

    @pytest.mark.parametrize("state", ENDED)
    def test_a_final_state_ends_the_job(self, jobs: Jobs, state: JobState) -> None:
        start = time.time()
        job = in_state(jobs, state)

        after = jobs.get(job)
        assert after.state.over
        assert after.ended_at is not None
        assert start <= after.ended_at <= time.time()
        assert jobs.active() == []
        assert [each.id for each in jobs.all()] == [job], "it is still listed"

    @pytest.mark.parametrize("state", JobState)
    def test_commands_allowed_in_each_state(
        self, jobs: Jobs, ledger: RedisClient, state: JobState
    ) -> None:
        possible: dict[str, tuple[Callable[[str], JobRecord], JobState, set[JobState]]] = {
            "pause": (jobs.pause, JobState.PAUSED, {JobState.RUNNING}),
            "resume": (jobs.resume, JobState.RUNNING, {JobState.PAUSED}),
            "cancel": (jobs.cancel, JobState.CANCELLED, set(JobState) - set(ENDED)),
        }
        for command, to, allowed in possible.values():
            job = in_state(jobs, state)
            report_facts(ledger, job)
            ledger.hset(LedgerKeys(job).record, "started_at", 1.0)
            # a repeated command changes nothing and is not an error
            if state in allowed | {to}:
                assert command(job).state is to
            else:
                with pytest.raises(Conflict, match=state.phrase):
                    command(job)
                assert jobs.get(job).state is state

    def test_a_job_paused_before_the_controller_started_it_resumes_as_starting(
        self, jobs: Jobs, ledger: RedisClient
    ) -> None:
        job = in_state(jobs, JobState.PAUSED)
        report_facts(ledger, job)
        assert jobs.resume(job).state is JobState.STARTING

    def test_exactly_one_of_several_concurrent_transitions_succeeds(self, jobs: Jobs) -> None:
        job = in_state(jobs, JobState.RUNNING)
        start, states = threading.Barrier(4), (*ENDED, JobState.FINISHING)

        def end(state: JobState) -> bool:
            start.wait(PATIENCE)
            return jobs.transition(job, state, [JobState.RUNNING], why=state.value)

        with ThreadPoolExecutor(4) as pool:
            succeeded = dict(zip(states, pool.map(end, states), strict=True))

        assert [state for state in states if succeeded[state]] == [jobs.get(job).state]

    def test_an_unknown_job_is_not_found(self, jobs: Jobs, ledger: RedisClient) -> None:
        calls: list[Callable[[], object]] = [
            lambda: jobs.get("none"),
            lambda: jobs.pause("none"),
            lambda: jobs.cancel("none"),
            lambda: jobs.transition("none", JobState.FAILED, JobState, why="?"),
        ]
        for call in calls:
            with pytest.raises(NotFound, match="there is no job none") as caught:
                call()
            assert caught.value.status == 404
        assert ledger.dbsize() == 0


def test_jobs_that_have_ended_cost_active_ones_nothing(jobs: Jobs, ledger: RedisClient) -> None:
    """A list of all jobs was read in each step: 1.3 s with 2,000 of them."""
    running = in_state(jobs, JobState.RUNNING)

    def cost() -> tuple[int, int]:
        before = ledger.info("stats")
        assert jobs.active() == [running]
        after = ledger.info("stats")
        name = "total_net_output_bytes"
        return (
            after["total_commands_processed"] - before["total_commands_processed"],
            round((after[name] - before[name]) / 1000),
        )

    alone = cost()
    for _ in range(50):
        jobs.cancel(jobs.submit(spec_of(), PACKAGE).id)

    assert len(jobs.all(limit=1000)) == 51
    assert cost() == alone


class TestStreams:
    def test_old_entries_are_dropped(
        self, jobs: Jobs, job: str, ledger: RedisClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("EVENTS_KEPT", "METRICS_KEPT", "LOG_LINES_KEPT"):
            monkeypatch.setattr(history, name, 50)
        keys = LedgerKeys(job)
        for number in range(200):
            jobs.event(job, "note", str(number))
            jobs.add_metrics(job, {"number": number})
        jobs.add_logs(job, "w", printed(map(str, range(200))))

        for stream in (keys.events, keys.metrics, keys.logs):
            assert 50 <= ledger.xlen(stream) <= 150, "streams are trimmed in blocks of 100"
        assert jobs.logs(job)[-1]["line"] == "199"
        assert jobs.events(job, limit=1000)[-1]["text"] == "199"


class TestRecords:
    def test_the_newest_failures_are_kept(
        self, jobs: Jobs, job: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(jobs_module, "FAILURES_KEPT", 10)
        failures = [
            Failure("w", f"train:{number}", "boom", "Traceback …", Cause.WORK)
            for number in range(15)
        ]
        for failure in failures:
            jobs.report_failure(job, failure)

        kept = [replace(each, at=0.0) for each in jobs.failures(job)]
        assert kept == failures[5:]

    def test_each_lost_machine_counts_once(self, jobs: Jobs, job: str) -> None:
        assert jobs.workers.record_losses([(job, "i-1", "evicted")]) == [True]
        assert jobs.workers.record_losses([(job, "i-1", "killed")]) == [False], "already recorded"
        assert jobs.workers.record_losses([(job, "i-2", "killed")]) == [True]
        assert jobs.workers.record_losses([(job, "i-3", "killed")]) == [True]

        after = jobs.get(job)
        assert (after.evictions, after.kills) == (1, 2)


class TestServers:
    def test_a_ledger_restored_to_an_earlier_state_repeats_no_token(
        self, ledger: RedisClient
    ) -> None:
        servers = Servers(ledger)
        # a count ahead of the clock, so that only the nonce differs
        before = (int(time.time()) + 1000) << NONCE_BITS
        ledger.hset(names.SERVER_TOKENS, "a", before)
        lost = servers.new_token("a")

        ledger.hset(names.SERVER_TOKENS, "a", before)
        again = servers.new_token("a")

        assert lost != again
        assert lost >> NONCE_BITS == again >> NONCE_BITS

    def test_an_emptied_ledger_still_returns_newer_tokens(self, ledger: RedisClient) -> None:
        servers = Servers(ledger)
        before = [servers.new_token("a") for _ in range(3)][-1]
        count = before >> NONCE_BITS
        ledger.delete(names.SERVER_TOKENS)

        # each start takes at most one token, and no two starts are in the same second
        await_truth(lambda: time.time() > count + 1)

        assert servers.new_token("a") > before


def test_requests_stay_in_order_until_they_are_finished(ledger: RedisClient) -> None:
    control = Control(ledger)
    for number in range(3):
        control.request("evict", number=number)

    (first, is_late), _ = control.requests(2)
    control.finish(first)

    assert (first["number"], is_late) == (0, False)
    assert [each["number"] for each, _ in control.requests()] == [1, 2]
