"""Secrets of jobs: how they are named, read, encrypted, and kept out of output."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vcasgd import printable
from vcasgd.client.secrets import check_secret_files, read_secrets
from vcasgd.encryption import Recipient, StorageCipher, Undecipherable, encrypt_for
from vcasgd.errors import SpecError
from vcasgd.logging import configure_logging
from vcasgd.printable import hide, masked
from vcasgd.spec.job import JobSpec

SECRET = "hf_abcdefghijklmnop"


def spec_of(**fields: Any) -> JobSpec:
    return JobSpec.parse({"name": "a", "task": "t:T", "epochs": 1, **fields})


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printable, "_values", ())


class TestSpec:
    @pytest.mark.parametrize(
        ("secrets", "field"),
        [
            ({"HF": SECRET}, "secrets.HF"),
            ({"HF": {"env": f"{SECRET}-"}}, "secrets.HF.env"),
            ({"HF": {"value": SECRET}}, "secrets.HF.value"),
            ({"HF": {"env": [SECRET]}}, "secrets.HF.env"),
            ({"HF": {"env": "A", "file": SECRET}}, "secrets.HF"),
            ([SECRET], "secrets"),
            (SECRET, "secrets"),
        ],
    )
    def test_an_error_never_shows_a_value(self, secrets: Any, field: str) -> None:
        with pytest.raises(SpecError) as refused:
            spec_of(secrets=secrets)

        assert refused.value.field == field
        assert SECRET not in str(refused.value)

    @pytest.mark.parametrize(
        "name", ["VCASGD_TOKEN", "RAY_ADDRESS", "OMP_NUM_THREADS", "LD_PRELOAD", "PYTHONPATH"]
    )
    @pytest.mark.parametrize("where", ["env", "secrets"])
    def test_a_variable_without_effect_is_refused(self, name: str, where: str) -> None:
        value: Any = "x" if where == "env" else {}
        with pytest.raises(SpecError, match=rf"{where}\.{name}: {name} "):
            spec_of(**{where: {name: value}})

    def test_a_variable_has_one_value(self) -> None:
        with pytest.raises(SpecError, match="A is in env and in secrets"):
            spec_of(env={"A": "1"}, secrets={"A": {}})

    def test_a_file_is_relative_to_the_job_file(self, tmp_path: Path) -> None:
        path = tmp_path / "job.yaml"
        path.write_text(
            "{name: a, task: 't:T', epochs: 1, secrets: {A: {file: key}, B: {file: ~/key}, C: }}"
        )

        secrets = JobSpec.load(path).secrets

        assert secrets["A"].file == str(tmp_path.resolve() / "key")
        assert secrets["B"].file == str(Path("~/key").expanduser().resolve())
        assert secrets["C"].env is secrets["C"].file is None


class TestValues:
    def test_they_are_read_where_the_job_is_submitted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "key").write_text("two\nlines\n")
        monkeypatch.setenv("MINE", "one")
        monkeypatch.setenv("SAME", "same")
        sources = {"A": {"env": "MINE"}, "B": {"file": str(tmp_path / "key")}, "SAME": {}, "C": {}}

        values = read_secrets(spec_of(secrets=sources), {"C": "given"})

        assert values == {"A": "one", "B": "two\nlines", "SAME": "same", "C": "given"}

    @pytest.mark.parametrize(
        ("source", "problem"),
        [
            ({"env": "UNSET_VARIABLE"}, "UNSET_VARIABLE is not in your environment"),
            ({"file": "/missing/file"}, "/missing/file: No such file"),
            ({"file": "/dev/null"}, "has 0 characters"),
        ],
    )
    def test_a_source_without_a_value_is_named(self, source: Any, problem: str) -> None:
        with pytest.raises(SpecError, match=rf"secrets\.A: .*{problem}"):
            read_secrets(spec_of(secrets={"A": source}))

    def test_a_file_in_the_package_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "key").write_text(SECRET)
        secrets = {"A": {"file": str(tmp_path / "key")}}
        spec = spec_of(secrets=secrets, working_dir=str(tmp_path))

        with pytest.raises(SpecError, match=r"secrets\.A: .* would be in the job's package"):
            check_secret_files(spec)

        (tmp_path / ".vcasgdignore").write_text("key\n")
        check_secret_files(spec)


class TestEncryption:
    def test_only_the_key_and_the_place_decrypt_what_is_stored(self) -> None:
        token = StorageCipher("a" * 32).encrypt(SECRET, "job-1")

        assert SECRET not in token
        assert StorageCipher("a" * 32).decrypt(token, "job-1") == SECRET
        for key, place in (("b" * 32, "job-1"), ("a" * 32, "job-2")):
            with pytest.raises(Undecipherable):
                StorageCipher(key).decrypt(token, place)

    def test_only_its_recipient_decrypts_a_message(self) -> None:
        one, other = Recipient(), Recipient()
        message = encrypt_for(one.address, SECRET, "job/worker")

        assert one.decrypt(message, "job/worker") == SECRET
        for recipient, place in ((other, "job/worker"), (one, "job/other")):
            with pytest.raises(Undecipherable):
                recipient.decrypt(message, place)
        with pytest.raises(Undecipherable):
            one.decrypt("no message", "job/worker")

    @pytest.mark.parametrize("address", ["", "?", "AAAA", "é"])
    def test_an_invalid_address_is_refused(self, address: str) -> None:
        with pytest.raises(ValueError, match=r"."):
            encrypt_for(address, SECRET, "job/worker")


class TestMasking:
    def test_values_and_their_lines_are_replaced(self) -> None:
        hide([SECRET, "first line\nsecond line", f"{SECRET}-and-more", "short"])

        assert masked(f"a {SECRET}-and-more, {SECRET}.") == "a ***, ***."
        assert masked("of second line and first line") == "of *** and ***"
        assert masked("short") == "short"

    def test_log_records_and_tracebacks_lack_them(self, configured: io.StringIO) -> None:
        hide([SECRET])
        try:
            raise RuntimeError(f"401 for {SECRET}")
        except RuntimeError:
            logging.getLogger("x").exception("refused %s", SECRET)

        assert SECRET not in configured.getvalue()
        assert "RuntimeError: 401 for ***" in configured.getvalue()

    @pytest.fixture(params=["text", "json"])
    def configured(
        self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[io.StringIO]:
        output, root = io.StringIO(), logging.getLogger()
        before = root.handlers[:], root.level
        monkeypatch.setenv("VCASGD_LOG_FORMAT", request.param)
        monkeypatch.setattr("sys.stderr", output)
        configure_logging("worker")
        yield output
        root.handlers[:] = before[0]
        root.setLevel(before[1])
