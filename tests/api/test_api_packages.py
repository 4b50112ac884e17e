"""Upload of packages: digests, checks, and limits."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import httpx
import pytest
from support.api_harness import PACKAGE_LIMIT_MB, Api, spec, zipped

from vcasgd.client import Client
from vcasgd.errors import ApiError, PackageError
from vcasgd.limits import MAX_UPLOADED_BYTES
from vcasgd.store.ledger.api_tokens import ApiTokens
from vcasgd.task.package import digest_of

LIMIT = int(PACKAGE_LIMIT_MB * 1e6)


def test_package_is_stored_once(api: Api, http: httpx.Client) -> None:
    data = zipped()
    path = f"packages/{digest_of(data)}"

    assert http.head(path).status_code == 404
    first = http.put(path, content=data)
    again = http.put(path, content=data)

    assert first.status_code == again.status_code == 200
    assert first.json() == again.json() == {"digest": digest_of(data), "size": len(data)}
    assert http.head(path).status_code == 200
    assert api.storage.get(f"{path}.zip") == data


def test_damaged_package_is_refused(http: httpx.Client) -> None:
    data = zipped()

    answer = http.put(f"packages/{digest_of(data)}", content=data[:-1])

    assert answer.status_code == 422
    assert answer.json()["type"] == "urn:vcasgd:problem:invalid-package"
    assert "digest" in answer.json()["detail"]
    assert http.head(f"packages/{digest_of(data)}").status_code == 404


def of_a_later_version() -> bytes:
    data = zipped()
    entry = data.index(b"PK\x01\x02")
    return data[: entry + 6] + b"\xff" + data[entry + 7 :]


@pytest.mark.parametrize(
    "data", [b"", b"no zip", zipped()[:-4], zipped(**{"../evil.py": ""}), of_a_later_version()]
)
def test_unsafe_package_is_refused(client: Client, data: bytes) -> None:
    with pytest.raises(PackageError):
        client.upload(data)


def test_package_over_the_limit_is_refused(client: Client) -> None:
    with pytest.raises(ApiError, match="larger than 1 MB") as caught:
        client.upload(b"x" * (LIMIT + 1))
    assert caught.value.status == 413
    with pytest.raises(ApiError, match="larger than 1 MB"):
        client.upload(bytes(40 * LIMIT))
    assert "VCASGD_PACKAGE_LIMIT_MB" in (caught.value.remedy or "")


def test_limit_applies_to_a_body_without_a_length(api: Api, http: httpx.Client) -> None:
    before = api.process.resident_bytes()

    answer = http.put(f"packages/{'0' * 64}", content=(bytes(65_536) for _ in range(1000)))

    assert answer.status_code == 413
    assert api.process.resident_bytes() - before < 30 * LIMIT


def test_a_token_uploads_a_limited_amount_in_a_day(api: Api, http: httpx.Client) -> None:
    # Given a token whose uploads are at the limit
    created = http.post("tokens", json={"name": "ann", "scope": "submit"}).json()
    ApiTokens(api.connection).count_upload("ann", MAX_UPLOADED_BYTES)
    data = zipped(**{"new.py": "1"})
    path = f"packages/{digest_of(data)}"

    # Then a new package of it is refused, until another user has stored it
    with api.http(created["token"]) as own:
        refused = own.put(path, content=data)
        assert refused.status_code == 403, "not a status after which clients send it again"
        assert "20 GB of packages within a day" in refused.json()["detail"]
        assert http.head(path).status_code == 404
        assert http.put(path, content=data).status_code == 200
        assert own.put(path, content=data).status_code == 200
    assert ApiTokens(api.connection).count_upload("ann", 0) == MAX_UPLOADED_BYTES


def test_directory_is_packed_uploaded_and_submitted(
    api: Api, client: Client, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("class Digits: ...")

    first = client.submit_directory(spec(working_dir=str(tmp_path)))
    second = client.submit_directory(spec(working_dir=str(tmp_path)))

    assert first.id != second.id
    assert first.package == second.package
    with zipfile.ZipFile(io.BytesIO(api.storage.get(f"packages/{first.package}.zip"))) as archive:
        assert archive.namelist() == ["train.py"]
