"""The job specification: defaults, round trips, and messages for mistakes."""

from __future__ import annotations

import contextlib
import json
import math
import time
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcasgd.errors import SpecError
from vcasgd.limits import MAX_DEPTH, MAX_DIGITS, MAX_TEXT, MAX_VALUES
from vcasgd.spec.job import LENGTHS, JobSpec
from vcasgd.spec.sections import Evaluate
from vcasgd.spec.update import RoundsSpec
from vcasgd.spec.values import parse_duration

LEAST: dict[str, Any] = {"name": "digits", "task": "train:Digits", "epochs": 20}


def spec(**fields: Any) -> JobSpec:
    return JobSpec.parse({**LEAST, "subtasks_per_epoch": 15, **fields})


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def shared(depth: int) -> list[Any]:
    """Return a list that has 2^depth values, and takes no more memory than ``depth`` lists."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value, value]
    return value


def test_defaults() -> None:
    job = spec()

    assert job.update == RoundsSpec(codec="auto")
    assert (job.push_interval, job.keeps_optimizer, job.known_subtasks) == (2, True, 300)
    assert spec(update={"codec": "int8"}).update == RoundsSpec(codec="int8")


@pytest.mark.parametrize(
    "job",
    [
        spec(),
        spec(update={"rule": "sma", "staleness": {"function": "hinge"}}),
        spec(stop={"max_duration": "1.5s"}),
        spec(finish_by="2026-12-01T08:00"),
        spec(within="12h"),
        spec(evaluate={"every": "500 steps"}),
    ],
)
def test_json_round_trip(job: JobSpec) -> None:
    assert JobSpec.parse(json.loads(job.model_dump_json())) == job


def test_the_json_schema_helps_an_editor_with_lengths_and_evaluations() -> None:
    schema = JobSpec.model_json_schema()

    for name in LENGTHS:
        assert schema["properties"][name]["description"]
        assert name not in schema["required"]
    every = schema["$defs"]["Evaluate"]["properties"]["every"]
    assert [Evaluate(every=each).every for each in every["examples"]] == every["examples"]


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"epocs": 3}, "epocs", r"there is no such field \(did you mean epochs\?\)"),
        ({"epocs": 3, "worker": {}}, "epocs", r"; worker: .* field \(did you mean workers\?\)"),
        ({"update": {"gain": 1}}, "update.gain", r"known fields: codec, rule"),
        ({"workers": {"mx": 1}}, "workers.mx", r"did you mean max\?"),
        ({"update": {"rule": "sma", "staleness": {"c": 1}}}, "update.staleness.c", "a, b, func"),
        ({"priority": "urgent"}, "priority", "must be 'low', 'normal' or 'high'; not 'urgent'"),
        ({"update": {"rule": "sgd"}}, "update.rule", "unknown rule 'sgd' .*'async-local-sgd'"),
        ({"update": "vc-asgd"}, "update", "must be a mapping of fields, not 'vc-asgd'"),
        ({"workers": 4}, "workers", "must be a mapping of fields, not 4 .its fields: min, max, "),
        ({"args": 4}, "args", "must be a mapping; not 4"),
        ({"update": {"rule": "vc-asgd", "alpha": 1}}, "update.alpha", "between 0 and 1, .* not 1$"),
        ({"update": {"alpha": 0.9}}, "update.alpha", "rule rounds has .*that has it: vc-asgd.$"),
        ({"update": {"rule": "vc-asgd", "codec": "int8"}}, "update.codec", "32' or 'bfloat16'"),
        ({"update": {"codec": "gzip"}}, "update.codec", "'int8', .* or 'rows'; not 'gzip'"),
        ({"update": {"rule": "sma", "staleness": {"a": math.inf}}}, "update.staleness.a", "finite"),
        ({"push_every": 0}, "push_every", "number of local steps above 0 or the word subtask; not"),
        ({"push_every": True}, "push_every", "not True"),
        (
            {"name": "My Job"},
            "name",
            "must be up to 63 lowercase letters and .*; not 'My Job'$",
        ),
        ({"task": "train"}, "task", r"neither module:Class nor a script .*\(for example train:My"),
        ({"task": "../train.py"}, "task", "'../train.py' is neither module:Class nor a script"),
        ({"epochs": 0}, "epochs", "must be greater than or equal to 1; not 0"),
        ({"max_samples": 5}, "max_samples", r"can't be set together with epochs \(remove one"),
        ({"epochs": None, "max_samples": 1, "max_steps": 1}, "max_steps", "with max_samples"),
        ({"epochs": None}, "epochs", r"is required \(set one of epochs, max_samples, max_steps"),
        ({"workers": {"min": 5, "max": 2}}, "workers", r"min \(5\) is larger than max \(2\)"),
        ({"workers": {"on_demand_min": 5}}, "workers", r"on_demand_min \(5\) is larger than max"),
        ({"labels": "eu-only"}, "labels", r"a list of labels such as \[confidential"),
        ({"labels": ["EU only"]}, "labels.0", "must be up to 63 lowercase letters"),
        ({"data": {"labels": [1]}}, "data.labels", "a list of labels"),
        ({"workers": {"pools": []}}, "workers.pools", "must be a list of at least one"),
        ({"workers": {"pools": "aws"}}, "workers.pools", "not 'aws'"),
        ({"stop": {"metric": {"mode": "min"}}}, "stop.metric.name", "is required"),
        ({"stop": {"metric": ["loss"]}}, "stop.metric", "must be a mapping of fields"),
        ({"stop": {"metric": "rouge"}}, "stop.metric", "write {name: rouge, mode: min}, or mode"),
        ({"stop": {"accuracy": 0.9, "metric": "loss"}}, "stop", "accuracy and metric are both set"),
        ({"evaluate": {"every": 500}}, "evaluate.every", "a unit, such as 500 steps, .* not 500"),
        ({"evaluate": {"every": "500"}}, "evaluate.every", "must be epoch, a number of steps or"),
        ({"evaluate": {"every": "5 epochs"}}, "evaluate.every", "not '5 epochs'"),
        ({"evaluate": {"every": "0 steps"}}, "evaluate.every", "from 1 to .* steps; not '0 steps'"),
        ({"evaluate": {"every": "0m"}}, "evaluate.every", "or a duration such as 10m; not '0m'"),
        ({"evaluate": {"each": "epoch"}}, "evaluate.each", r"no such field \(known fields: every"),
        ({"tuning": {"local_steps": "yes"}}, "tuning.local_steps", "true or false; not 'yes'"),
        ({"tuning": {"learners_per_machine": 0}}, "tuning.learners_per_machine", "greater than"),
        ({"tuning": {"speed": True}}, "tuning.speed", "there is no such field"),
        ({"checkpoint": {"every": "5x"}}, "checkpoint.every", "'5x' is not a duration"),
        ({"args": {"x": float("nan")}}, "args", "has a number that is not finite"),
        ({"args": {"when": timedelta(1)}}, "args", "can't contain a timedelta, .* quotes around"),
        ({"args": {"x": {1: 2}}}, "args", "only text as keys"),
        ({"args": {"x": nested(230)}}, "args", f"deeper than {MAX_DEPTH} levels"),
        ({"args": {"x": shared(25)}}, "args", f"more than {MAX_VALUES} values"),
        ({"args": {"x": [0] * MAX_VALUES}}, "args", f"more than {MAX_VALUES} values"),
        ({"args": {"x": 10**MAX_DIGITS}}, "args", f"more than {MAX_DIGITS} digits"),
        ({"args": {"x": "a" * (MAX_TEXT + 1)}}, "args", f"more than {MAX_TEXT} characters"),
        ({"args": {"x": "\ud800"}}, "args", "not Unicode"),
        ({"args": {1: 2}}, "args.1", "must be text"),
        ({"workers": {"gpus": "x"}}, "workers.gpus", "must be 'all' or a whole number; not 'x'"),
        ({"workers": {"gpus": 0}}, "workers.gpus", "must be 'all' or greater .* 1; not 0$"),
        ({"workers": {"gpus": 0, "max": "x"}}, "workers.max", "gpus: must be 'all' or gre"),
        ({"resources": {"gpus": 0, "gpu_types": ["L4"]}}, "resources", "gpus: 0 can't be combined"),
        ({"track": [{"to": "mlflow", "x": 1}]}, "track.0.x", "no such field .known fields: "),
        ({"seed": -1, "epochs": 0}, "epochs", r"not 0; seed: must be greater"),
    ],
)
def test_a_mistake_is_explained(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        spec(**fields)

    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


def test_a_value_that_costs_too_much_is_not_written_out() -> None:
    class Huge(list[Any]):
        def __repr__(self) -> str:
            raise AssertionError("it takes a minute")

    with pytest.raises(SpecError, match="deeper than"):
        spec(args={"x": [Huge(), nested(230)]})


@pytest.mark.parametrize("field", LEAST)
def test_required_fields(field: str) -> None:
    fields = {key: value for key, value in LEAST.items() if key != field}

    with pytest.raises(SpecError, match=f"{field}: is required"):
        JobSpec.parse(fields)


@pytest.mark.parametrize(
    ("field", "number", "text"),
    [("epochs", 10, "10 epochs"), ("max_samples", 50_000, "50000 samples"),
     ("max_steps", 300, "300 steps")],
)  # fmt: skip
def test_a_job_has_one_length(field: str, number: int, text: str) -> None:
    job = JobSpec.parse({"name": "digits", "task": "train:Digits", field: number})

    assert job.length == text
    assert job.known_subtasks is None


@pytest.mark.parametrize("value", [None, [], "job", 3])
def test_a_job_that_is_not_a_mapping(value: object) -> None:
    with pytest.raises(SpecError, match="job: must be a mapping of fields"):
        JobSpec.parse(value)


@pytest.mark.parametrize(
    ("stop", "metrics", "reached"),
    [
        ({"accuracy": 0.9}, {"accuracy": 0.9}, True),
        ({"accuracy": 0.9}, {"accuracy": 0.89}, False),
        ({"accuracy": 0.9}, {"loss": 0.95}, False),
        ({"metric": {"name": "loss", "mode": "min", "target": 1.2}}, {"loss": 1.2}, True),
        ({"metric": {"name": "loss", "mode": "min", "target": 1.2}}, {"loss": 1.3}, False),
        ({"metric": {"name": "loss", "mode": "min", "target": -1}}, {"loss": -2.0}, True),
        ({"metric": {"name": "loss", "mode": "min", "target": 1}}, {"loss": -math.inf}, False),
        ({"metric": {"name": "f1", "mode": "max", "target": 0.5}}, {"f1": math.nan}, False),
        ({"metric": {"name": "f1", "mode": "max", "target": 0.5}}, {"f1": 0.6}, True),
        ({"metric": {"name": "f1", "mode": "max"}}, {"f1": 0.6}, False),
        ({"metric": {"name": "perplexity", "target": 4.5}}, {"perplexity": 4.4}, True),
        ({"metric": "perplexity"}, {"perplexity": 4.4}, False),
    ],
)
def test_a_target_is_reached_by_any_metric(
    stop: dict[str, Any], metrics: dict[str, float], reached: bool
) -> None:
    metric = spec(stop=stop).stop.chosen_metric

    assert metric is not None
    assert metric.reached_by(metrics) is reached


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from([*JobSpec.model_fields, "other"]), json_values))
def test_any_nonsense_is_a_spec_error(fields: dict[str, Any]) -> None:
    with contextlib.suppress(SpecError):
        job = JobSpec.parse({**LEAST, **fields})
        assert JobSpec.parse(json.loads(job.model_dump_json())) == job


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 90),
        (0.5, 0.5),
        ("90", 90),
        ("30s", 30),
        ("5m", 300),
        ("1.5h", 5400),
        (" 2 d ", 172_800),
        (timedelta(seconds=7), 7),
    ],
)
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text",
    ["", "m", "5 minutes", "-5m", "1e3", 0, -1, True, None, [1], float("nan"), timedelta(0)],
)
def test_invalid_durations(text: object) -> None:
    with pytest.raises(ValueError, match=r"is not a duration|must be longer than 0"):
        parse_duration(text)


@pytest.mark.parametrize("text", [float("inf"), 10**400, "9999999999d", "9" * 400 + "s"])
def test_durations_that_are_too_long(text: object) -> None:
    with pytest.raises(ValueError, match="is too long"):
        parse_duration(text)


class TestLoad:
    def write(self, path: Path, text: str) -> Path:
        file = path / "job.yaml"
        file.write_text(text)
        return file

    def test_the_working_directory_is_relative_to_the_file(self, tmp_path: Path) -> None:
        (tmp_path / "jobs").mkdir()
        file = self.write(tmp_path / "jobs", f"{json.dumps({**LEAST, 'working_dir': '../code'})}\n")

        assert JobSpec.load(file).working_dir == str(tmp_path / "code")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", r"does not contain a job \(write at least name, task"),
            ("- a", "does not contain a job"),
            ("name: a\nseed: -1", r"task: is required; seed: must be "),
        ],
    )
    def test_a_mistake_names_the_file(self, tmp_path: Path, text: str, message: str) -> None:
        file = self.write(tmp_path, text)

        with pytest.raises(SpecError, match=message) as caught:
            JobSpec.load(file)
        assert str(caught.value).startswith(f"{file}: ")


def test_labels_of_the_job_and_of_its_data_add_up() -> None:
    labelled = spec(labels=["b", "a", "b"], data={"labels": ["c", "a"]})

    assert labelled.labels == ("a", "b")
    assert labelled.required_labels == ("a", "b", "c")
    assert JobSpec.parse(json.loads(labelled.model_dump_json())) == labelled


@pytest.mark.parametrize(
    ("fields", "deadline"),
    [
        ({}, None),
        ({"within": "12h"}, 1_000.0 + 12 * 3600),
        ({"finish_by": "1970-01-01T01:00+01:00"}, 0.0),
        ({"finish_by": "1970-01-02T00:00Z"}, 86_400.0),
        ({"finish_by": "1970-01-02T00:00"}, 86_400.0 + time.timezone),
        ({"finish_by": "1970-01-02"}, 86_400.0 + time.timezone),
        ({"finish_by": date(1970, 1, 2)}, 86_400.0 + time.timezone),
    ],
)
def test_deadline(fields: dict[str, Any], deadline: float | None) -> None:
    assert spec(**fields).deadline(1_000.0) == deadline


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"finish_by": "tomorrow"}, "finish_by: must be a time such as 2026-12-01T08:00"),
        ({"finish_by": 5}, "finish_by: must be a time such as"),
        ({"within": "0s"}, "within: must be longer than 0 seconds"),
        ({"within": "2h", "finish_by": "2026-12-01T08:00"}, "finish_by and within are both set"),
    ],
)
def test_wrong_deadlines_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        spec(**fields)
