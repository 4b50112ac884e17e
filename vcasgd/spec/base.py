"""The ``base`` of a job: a file or folder that every machine loads itself."""

from __future__ import annotations

from pathlib import PurePosixPath
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from vcasgd.spec.strict import StrictModel

#: Name of a list of files, as ``sha256sum`` writes it. It makes the base the folder of these files.
LIST_NAME = "SHA256SUMS"
SCHEMES = ("s3", "gs", "https", "http", "file")


class BaseSpec(StrictModel):
    """Weights that don't change during training, as a file with this digest.

    If the file's name is ``SHA256SUMS``, the base is the folder of the files that it lists.
    """

    location: str = Field(
        max_length=2000,
        description="s3://…, gs://…, https://…, or an absolute path on the machines",
    )
    sha256: str = Field(
        pattern=r"^[0-9a-f]{64}$", description="digest of the file, as sha256sum prints it"
    )

    @field_validator("location")
    @classmethod
    def _supported(cls, value: str) -> str:
        parts = urlsplit(value)
        if not (value.startswith("/") or parts.scheme in SCHEMES):
            raise ValueError(f"must be s3://…, gs://…, https://…, or an absolute path; not {value}")
        if not PurePosixPath(parts.path).name or value.endswith("/"):
            raise ValueError(f"must name a file, which can be a list such as …/{LIST_NAME}")
        if parts.username or parts.password or parts.query:
            raise ValueError("can't contain a password or a query: job files are not secret")
        return value

    @property
    def is_folder(self) -> bool:
        """True if the file lists those of a folder."""
        return PurePosixPath(urlsplit(self.location).path).name == LIST_NAME
