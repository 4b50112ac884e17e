"""Fields of log lines: the job, the worker, and the request that they are about."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest

from vcasgd.logging import REQUEST_ID, bound, current_fields, request_id

#: Logs one line without fields, one about a job, and one with an exception.
PROGRAM = """
import logging
from vcasgd.logging import bound, identify
from vcasgd.logging import configure_logging
configure_logging("worker")
log = logging.getLogger("example")
log.info("alone")
identify(worker="w-1")
with bound(job="j-1", request="r-1"):
    log.info("100%% of %s", "it")
    try:
        1 / 0
    except ZeroDivisionError:
        log.exception("oh")
    log.info("by a worker: \\x1b]0;title\\x07\\n2026-01-01 worker ERROR: forged")
"""


def logged(log_format: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "VCASGD_LOG_FORMAT": log_format},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stderr.splitlines()


def test_text_lines_end_with_the_fields() -> None:
    alone, about, *rest = logged("text")

    assert alone.endswith("INFO example: alone")
    assert about.endswith("INFO example: 100% of it [job=j-1 worker=w-1 request=r-1]")
    assert rest[-3] == "  ZeroDivisionError: division by zero"
    assert rest[-1] == "  2026-01-01 worker ERROR: forged [job=j-1 worker=w-1 request=r-1]"


def test_json_lines_are_objects_with_the_fields() -> None:
    alone, about, wrong, _ = (json.loads(line) for line in logged("json"))

    assert (alone["role"], alone["level"], alone["message"]) == ("worker", "INFO", "alone")
    assert not {"job", "worker", "request"} & alone.keys()
    fields = {"job": "j-1", "worker": "w-1", "request": "r-1"}
    assert about.items() >= {**fields, "logger": "example", "message": "100% of it"}.items()
    assert about["at"] <= wrong["at"]
    assert "ZeroDivisionError" in wrong["exc_info"]


def test_bound_fields_apply_inside_and_in_no_other_thread() -> None:
    with ThreadPoolExecutor(1) as pool, bound(job="j", request="outer"):
        with bound(request="inner", worker=None):
            assert current_fields() == {"job": "j", "request": "inner"}
            assert pool.submit(request_id).result() is None
            assert pool.submit(copy_context().run, request_id).result() == "inner"
        assert request_id() == "outer"
    assert request_id() is None


@pytest.mark.parametrize("text", ["", "a b", "a\n", "x" * 65, "ä", 'a"', "a=b", "[a]"])
def test_text_that_needs_quoting_is_not_a_request_id(text: str) -> None:
    assert not REQUEST_ID.fullmatch(text)
