"""Emulated clouds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.provider_backends import AwsBackend, GcpBackend, aws_backend, gcp_backend


@pytest.fixture
def aws() -> Iterator[AwsBackend]:
    with aws_backend() as backend:
        yield backend


@pytest.fixture
def gcp() -> Iterator[GcpBackend]:
    with gcp_backend() as backend:
        yield backend
