"""Jobs in the ledger: submitted once, changed only as their state allows, well documented."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from support.waiting import PATIENCE, await_truth
from support.world import World, spec_of

from vcasgd.errors import Conflict, NotFound, StoreError
from vcasgd.store import keys as names
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger import events as history
from vcasgd.store.ledger.job import Failure, JobRecord, JobState, ModelFacts
from vcasgd.store.ledger.jobs import FAILURES_KEPT, IDEMPOTENCY_SECONDS, Jobs
from vcasgd.store.ledger.servers import NONCE_BITS, Control, Pool, Servers

PACKAGE = "a" * 64
OVER = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


@pytest.fixture
def jobs(ledger: RedisClient) -> Jobs:
    return Jobs(ledger)


def in_state(jobs: Jobs, state: JobState) -> str:
    job = jobs.submit(spec_of(), PACKAGE).id
    assert jobs.transition(job, state, JobState, why="test")
    return job


def tell_facts(ledger: RedisClient, job: str) -> None:
    """As the worker does that makes the first snapshot."""
    facts = ModelFacts(samples=10, validation_samples=1, layout="{}", order_digest="d")
    ledger.hset(LedgerKeys(job).facts, "facts", json.dumps(facts.to_dict()))


def kinds(events: Iterable[dict[str, Any]]) -> list[str]:
    return [event["kind"] for event in events]


class TestSubmit:
    def test_a_job_starts_with_everything_that_was_asked_for(self, jobs: Jobs) -> None:
        began = time.time()
        spec = spec_of(name="cifar", epochs=4, update={"rule": "vc-asgd", "alpha": 0.9})

        job = jobs.submit(spec, PACKAGE)

        assert job.id.startswith("cifar-")
        assert (job.spec, job.package, job.state) == (spec, PACKAGE, JobState.STARTING)
        assert (job.version, job.finished_epochs, job.totals, job.evaluations) == (0, 0, {}, ())
        assert {job.started_at, job.ended_at, job.reason, job.facts, job.best} == {None}
        assert began <= job.created_at <= time.time()
        assert jobs.work(job.id) == {
            "next": 0, "finished": 0, "total": 12, "per_epoch": 3, "lead": 1,
        }  # fmt: skip
        assert kinds(jobs.events(job.id)) == ["submitted"]
        assert jobs.active() == [job.id]

    def test_without_a_key_each_is_a_new_job(self, jobs: Jobs) -> None:
        first, second = (jobs.submit(spec_of(), PACKAGE) for _ in range(2))

        assert first.id != second.id
        assert sorted(jobs.active()) == sorted([first.id, second.id])

    def test_the_same_key_and_body_is_the_same_job(self, jobs: Jobs) -> None:
        first, created = jobs.submit_once(spec_of(), PACKAGE, "key")
        again, created_again = jobs.submit_once(spec_of(), PACKAGE, "key")

        assert (created, created_again) == (True, False)
        assert again == first
        assert len(jobs.all()) == 1
        assert kinds(jobs.events(first.id)) == ["submitted"], "not even a second event"

    @pytest.mark.parametrize(
        ("spec", "package"), [(spec_of(epochs=9), PACKAGE), (spec_of(), "b" * 64)]
    )
    def test_the_same_key_for_another_body_is_refused(
        self, jobs: Jobs, spec: Any, package: str
    ) -> None:
        jobs.submit(spec_of(), PACKAGE, "key")

        with pytest.raises(Conflict) as caught:
            jobs.submit(spec, package, "key")

        assert caught.value.status == 409
        assert len(jobs.all()) == 1

    def test_a_key_is_remembered_for_days_and_not_for_ever(
        self, jobs: Jobs, ledger: RedisClient
    ) -> None:
        jobs.submit(spec_of(), PACKAGE, "key")

        (name,) = ledger.keys("*idempotency*")
        assert 6 * 24 * 3600 < ledger.ttl(name) <= IDEMPOTENCY_SECONDS

    def test_eight_at_once_make_one_job(self, jobs: Jobs) -> None:
        made: list[tuple[JobRecord, bool]] = []
        start = threading.Barrier(8)

        def submit() -> None:
            start.wait(PATIENCE)
            made.append(jobs.submit_once(spec_of(), PACKAGE, "key"))

        threads = [threading.Thread(target=submit) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)

        assert len(made) == 8
        assert len({job.id for job, _ in made}) == 1
        assert sum(created for _, created in made) == 1
        assert len(jobs.all()) == len(jobs.active()) == 1


class TestTransitions:
    def test_an_allowed_one_says_so_in_an_event(self, jobs: Jobs) -> None:
        job = jobs.submit(spec_of(), PACKAGE).id

        assert jobs.transition(
            job, JobState.RUNNING, [JobState.STARTING], why="facts are known", started_at=12.5
        )

        after = jobs.get(job)
        assert (after.state, after.reason, after.started_at) == (
            JobState.RUNNING, "facts are known", 12.5,
        )  # fmt: skip
        event = jobs.events(job)[-1]
        assert (event["kind"], event["text"]) == ("job-running", "facts are known")

    def test_a_refused_one_changes_nothing(self, jobs: Jobs) -> None:
        job = in_state(jobs, JobState.PAUSED)
        before, events = jobs.get(job), jobs.events(job)

        assert not jobs.transition(
            job, JobState.FINISHING, [JobState.RUNNING], why="no", final_epoch=3, model="m"
        )

        assert jobs.get(job) == before
        assert jobs.events(job) == events

    @pytest.mark.parametrize("state", OVER)
    def test_the_end_is_the_end(self, jobs: Jobs, state: JobState) -> None:
        began = time.time()
        job = in_state(jobs, state)

        after = jobs.get(job)
        assert after.state.over
        assert after.ended_at is not None
        assert began <= after.ended_at <= time.time()
        assert jobs.active() == []
        assert [each.id for each in jobs.all()] == [job], "it is still listed"

    def test_facts_of_the_end_are_kept(self, jobs: Jobs) -> None:
        job = in_state(jobs, JobState.RUNNING)

        jobs.transition(
            job, JobState.FINISHING, [JobState.RUNNING], why="done", final_epoch=2, traceback=None
        )
        model = "v000000000012-x.safetensors"
        jobs.transition(job, JobState.SUCCEEDED, [JobState.FINISHING], why="done", model=model)

        after = jobs.get(job)
        assert (after.final_epoch, after.model) == (2, model)
        assert after.traceback is None

    @pytest.mark.parametrize("state", JobState)
    def test_what_people_may_ask_for_in_each_state(
        self, jobs: Jobs, ledger: RedisClient, state: JobState
    ) -> None:
        possible: dict[str, tuple[Callable[[str], JobRecord], JobState, set[JobState]]] = {
            "pause": (jobs.pause, JobState.PAUSED, {JobState.RUNNING}),
            "resume": (jobs.resume, JobState.RUNNING, {JobState.PAUSED}),
            "cancel": (jobs.cancel, JobState.CANCELLED, set(JobState) - set(OVER)),
        }
        for command, to, allowed in possible.values():
            job = in_state(jobs, state)
            tell_facts(ledger, job)
            # asking for what already is so changes nothing and is no error: a repeated request
            if state in allowed | {to}:
                assert command(job).state is to
            else:
                with pytest.raises(Conflict, match=f"is {state}"):
                    command(job)
                assert jobs.get(job).state is state

    def test_a_job_that_was_paused_before_its_first_snapshot_starts_again(self, jobs: Jobs) -> None:
        job = in_state(jobs, JobState.PAUSED)
        assert jobs.resume(job).state is JobState.STARTING

    def test_a_job_goes_on_with_another_budget(self, jobs: Jobs) -> None:
        job = in_state(jobs, JobState.PAUSED)

        spec = jobs.resume(job, max_cost_usd=7.5).spec

        assert spec.stop.max_cost_usd == 7.5
        assert spec.model_copy(update={"stop": spec_of().stop}) == spec_of()

    def test_one_of_two_that_race_wins(self, jobs: Jobs) -> None:
        job = in_state(jobs, JobState.RUNNING)
        start, won = threading.Barrier(4), []

        def end(state: JobState) -> None:
            start.wait(PATIENCE)
            if jobs.transition(job, state, [JobState.RUNNING], why=state.value):
                won.append(state)

        threads = [
            threading.Thread(target=end, args=(state,)) for state in (*OVER, JobState.FINISHING)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)

        assert [jobs.get(job).state] == won

    def test_no_such_job(self, jobs: Jobs, ledger: RedisClient) -> None:
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


class TestListing:
    def test_newest_first_by_state_and_limited(self, jobs: Jobs, ledger: RedisClient) -> None:
        made = [
            in_state(jobs, state) for state in (JobState.RUNNING, JobState.FAILED, JobState.RUNNING)
        ]
        for score, job in enumerate(made):
            ledger.zadd(names.JOBS, {job: score})  # not all in the same millisecond

        assert [job.id for job in jobs.all()] == made[::-1]
        assert [job.id for job in jobs.all([JobState.RUNNING])] == [made[2], made[0]]
        assert [job.id for job in jobs.all(limit=2)] == [made[2], made[1]]
        assert jobs.active() == [made[0], made[2]]


class TestStreams:
    """Events, metrics and logs: each has ids with which a reader goes on."""

    @pytest.fixture
    def job(self, jobs: Jobs) -> str:
        return jobs.submit(spec_of(), PACKAGE).id

    def test_events_after_an_id(self, jobs: Jobs, job: str) -> None:
        for number in range(3):
            jobs.event(job, "note", f"number {number}", number=number)

        first, *others = jobs.events(job)
        assert first["kind"] == "submitted"
        assert [each["details"]["number"] for each in others] == [0, 1, 2]
        assert jobs.events(job, others[0]["id"]) == others[1:]
        assert jobs.events(job, others[-1]["id"]) == []
        assert jobs.events(job, first["id"], limit=2) == others[:2]

    def test_metrics_after_an_id(self, jobs: Jobs, job: str) -> None:
        for version in range(3):
            jobs.add_metrics(job, {"version": version, "loss": 0.5})

        points = jobs.metrics(job)
        assert [point["version"] for point in points] == [0, 1, 2]
        assert jobs.metrics(job, points[1]["id"]) == points[2:]
        assert jobs.metrics(job, limit=1) == points[:1]

    def test_logs_after_an_id(self, jobs: Jobs, job: str) -> None:
        jobs.add_logs(job, "w", ["one", "zwei ü", ""])
        jobs.add_logs(job, "v", [])

        lines = jobs.logs(job)
        assert [(line["worker"], line["line"]) for line in lines] == [
            ("w", "one"), ("w", "zwei ü"), ("w", ""),
        ]  # fmt: skip
        assert jobs.logs(job, lines[0]["id"]) == lines[1:]

    def test_waiting_returns_with_the_first_event(self, jobs: Jobs, job: str) -> None:
        last = jobs.events(job)[-1]["id"]
        heard: list[dict[str, Any]] = []
        listener = threading.Thread(
            target=lambda: heard.extend(jobs.events(job, last, wait_seconds=5))
        )
        listener.start()
        jobs.event(job, "note", "hello")
        listener.join(PATIENCE)

        assert kinds(heard) == ["note"]

    def test_waiting_ends_without_one(self, jobs: Jobs, job: str) -> None:
        last = jobs.events(job)[-1]["id"]
        started = time.monotonic()

        assert jobs.events(job, last, wait_seconds=0.05) == []

        assert time.monotonic() - started > 0.04

    @pytest.mark.parametrize("after", ["nonsense", "1-2-3", "-"])
    def test_an_id_that_is_none(self, jobs: Jobs, job: str, after: str) -> None:
        with pytest.raises(StoreError):
            jobs.events(job, after)

    def test_nothing_of_a_job_that_is_not_there(self, jobs: Jobs) -> None:
        assert jobs.events("none") == jobs.metrics("none") == jobs.logs("none") == []

    def test_old_entries_are_dropped(
        self, jobs: Jobs, job: str, ledger: RedisClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("EVENTS_KEPT", "METRICS_KEPT", "LOG_LINES_KEPT"):
            monkeypatch.setattr(history, name, 50)
        keys = LedgerKeys(job)
        for number in range(400):
            jobs.event(job, "note", str(number))
            jobs.add_metrics(job, {"number": number})
        jobs.add_logs(job, "w", map(str, range(400)))

        for stream in (keys.events, keys.metrics, keys.logs):
            assert 50 <= ledger.xlen(stream) <= 150, "it is cut a block of 100 at a time"
        assert jobs.logs(job)[-1]["line"] == "399"
        assert jobs.events(job, limit=1000)[-1]["text"] == "399"


class TestWhatLoopsSay:
    @pytest.fixture
    def job(self, jobs: Jobs) -> str:
        return jobs.submit(spec_of(), PACKAGE).id

    def test_failures_are_kept_up_to_a_number(self, jobs: Jobs, job: str) -> None:
        failures = [
            Failure("w", f"train:{number}", "boom", "Traceback …", fatal=number % 2 == 0)
            for number in range(FAILURES_KEPT + 5)
        ]
        for failure in failures:
            jobs.report_failure(job, failure)

        assert jobs.failures(job) == failures[5:]

    def test_each_lost_machine_counts_once(self, jobs: Jobs, job: str) -> None:
        assert jobs.vanished(job, "i-1", "evicted")
        assert not jobs.vanished(job, "i-1", "killed"), "known already"
        assert jobs.vanished(job, "i-2", "killed")
        assert jobs.vanished(job, "i-3", "killed")

        after = jobs.get(job)
        assert (after.evictions, after.kills) == (1, 2)

    def test_checkpoints_are_listed_as_they_are(self, jobs: Jobs, job: str) -> None:
        jobs.set_checkpoints(job, {"v2": {"version": 2}, "v1": {"version": 1}})
        assert list(jobs.checkpoints(job)) == ["v1", "v2"]

        jobs.set_checkpoints(job, {"v3": {"version": 3}})
        assert jobs.checkpoints(job) == {"v3": {"version": 3}}

        jobs.set_checkpoints(job, {})
        assert jobs.checkpoints(job) == {}

    def test_quarantined_workers_with_the_reason(self, jobs: Jobs, job: str) -> None:
        jobs.quarantine(job, "w", "checksum")

        assert jobs.quarantined(job) == {"w": "checksum"}

    def test_everything_of_a_job_is_under_its_own_keys(
        self, jobs: Jobs, job: str, ledger: RedisClient
    ) -> None:
        """So that whoever removes :meth:`LedgerKeys.all` removes all of it."""
        jobs.event(job, "note", "x")
        jobs.add_metrics(job, {})
        jobs.add_logs(job, "w", ["x"])
        jobs.drain(job, "w")
        jobs.quarantine(job, "w", "why")
        jobs.report_failure(job, Failure("w", "p", "m", "t", fatal=False))
        jobs.vanished(job, "i", "killed")
        jobs.set_checkpoints(job, {"v1": {}})
        found = {key.decode() for key in ledger.keys(f"*job:{job}:*")}

        assert found <= set(LedgerKeys(job).all())
        assert len(found) >= 11
        assert len(set(LedgerKeys(job).all())) == len(LedgerKeys(job).all())


class TestServers:
    def test_each_start_gets_a_newer_token(self, ledger: RedisClient) -> None:
        servers = Servers(ledger)

        tokens = [servers.new_token("a") for _ in range(5)]

        assert tokens == sorted(set(tokens))
        assert tokens[-1] < 2**53, "Lua's numbers have no more digits"

    def test_a_ledger_that_went_back_gives_no_token_twice(self, ledger: RedisClient) -> None:
        servers = Servers(ledger)
        # a count that is ahead of the clock, so that only the nonce can tell them apart
        before = (int(time.time()) + 1000) << NONCE_BITS
        ledger.hset(names.SERVER_TOKENS, "a", before)
        lost = servers.new_token("a")

        ledger.hset(names.SERVER_TOKENS, "a", before)
        again = servers.new_token("a")

        assert lost != again
        assert lost >> NONCE_BITS == again >> NONCE_BITS

    def test_an_emptied_ledger_gives_newer_tokens_all_the_same(self, ledger: RedisClient) -> None:
        servers = Servers(ledger)
        before = [servers.new_token("a") for _ in range(3)][-1]
        count = before >> NONCE_BITS
        ledger.delete(names.SERVER_TOKENS)

        # at most one token a start was given out, and no two starts are in one second
        await_truth(lambda: time.time() > count + 1)

        assert servers.new_token("a") > before

    def test_heartbeats(self, ledger: RedisClient) -> None:
        servers = Servers(ledger)
        servers.beat("a", {"at": 1})
        servers.beat("a", {"at": 2})

        assert servers.all() == {"a": {"at": 2}}


class TestControl:
    def test_one_controller_at_a_time(
        self, ledger: RedisClient, eventually: Callable[..., Any]
    ) -> None:
        control = Control(ledger)
        assert not control.held()
        token = control.hold("a", 0.1)

        assert control.hold("b", 60) == 0
        assert control.held()
        assert control.hold("a", 0.1) == token, "renewed"

        taken = eventually(lambda: control.hold("b", 60))
        assert taken > token
        assert control.hold("a", 60) == 0

    def test_requests_are_taken_once_in_order(self, ledger: RedisClient) -> None:
        control = Control(ledger)
        for number in range(3):
            control.request("evict", number=number)

        assert [each["number"] for each in control.take_requests(2)] == [0, 1]
        assert control.take_requests() == [{"kind": "evict", "number": 2}]
        assert control.take_requests() == []

    def test_the_view_of_the_fleet_is_replaced_whole(self, ledger: RedisClient) -> None:
        control = Control(ledger)
        control.show({"i-2": {}, "i-1": {"state": "up"}}, {"local": {"free": 2}})
        assert list(control.instances()) == ["i-1", "i-2"]

        control.show({"i-3": {}}, {})

        assert control.instances() == {"i-3": {}}
        assert control.pools() == {}

    def test_what_is_remembered_of_a_pool(self, ledger: RedisClient) -> None:
        control = Control(ledger)
        assert control.pool("local") == Pool()
        pool = Pool(3, 2, 17.5, "no capacity")

        control.set_pool("local", pool)

        assert Control(ledger).pool("local") == pool


def test_two_jobs_share_nothing(world: World) -> None:
    other = world.jobs.submit(spec_of(), PACKAGE).id
    before = world.jobs.get(world.job)

    world.jobs.cancel(other)
    world.jobs.event(other, "note", "x")
    world.jobs.quarantine(other, "w", "why")

    assert world.jobs.get(world.job) == before
    assert world.jobs.quarantined(world.job) == {}
