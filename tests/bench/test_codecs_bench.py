"""``python -m benchmarks.measure codecs``."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks.measure.__main__ import app
from vcasgd.learning.encodings import CODECS


def test_bench_codecs_measures_every_codec() -> None:
    result = CliRunner().invoke(app, ["codecs", "--size-mb", "1", "--seconds", "0.01", "--json"])

    assert result.exit_code == 0
    figures = {each["codec"]: each for each in json.loads(result.stdout)["codecs"]}
    assert set(figures) == {*CODECS, "rows"}
    shares = {name: each["share_of_float32"] for name, each in figures.items()}
    int8 = pytest.approx(64 / 252, rel=1e-3)
    partition = pytest.approx(1 / 8, rel=0.02)
    rows = pytest.approx(1 / 50, rel=0.02)
    assert shares == {
        "float32": 1.0,
        "bfloat16": 0.5,
        "int8": int8,
        # Bits of a packed number, for normally distributed ones.
        "int2": pytest.approx(2.09 / 32, rel=1e-2),
        "topk": 1 / 64,
        "partition": partition,
        "rows": rows,
    }
    assert figures["float32"]["relative_error"] == figures["rows"]["relative_error"] == 0
    assert 0 < figures["bfloat16"]["relative_error"] < figures["int8"]["relative_error"] < 0.01
    assert 0.5 < figures["partition"]["relative_error"] < figures["topk"]["relative_error"] < 1
    assert all(each["encode_gb_s"] > 0 and each["decode_gb_s"] > 0 for each in figures.values())
