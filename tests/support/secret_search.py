"""Search for a text in everything that a stack stores, shows, and runs."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from support.api_harness import operations
from support.waiting import PATIENCE

#: Seconds without a part of a body after which it is taken for an endless stream.
STREAM_SECONDS = 0.5


def forms(text: str) -> list[bytes]:
    """Return a text as it is, encoded for JSON, and the part of its base64 that is always there."""
    encoded = [base64.b64encode(b"x" * shift + text.encode())[4:-4] for shift in range(3)]
    return list({text.encode(), json.dumps(text)[1:-1].encode(), *encoded})


def in_files(folder: Path, text: str) -> list[Path]:
    wanted, found = forms(text), []
    for path in folder.rglob("*"):
        try:
            content = path.read_bytes() if path.is_file() else b""
        except FileNotFoundError:
            continue  # A temporary file.
        if any(form in content for form in wanted):
            found.append(path)
    return found


def in_processes(folder: Path, text: str) -> list[str]:
    """Return the processes of a stack that show a text in their command or first environment."""
    found, seen = [], 0
    for process in psutil.process_iter():
        try:
            shown = "\0".join([*process.cmdline(), *process.environ().values()])
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if str(folder) in shown:
            seen += 1
            if text in shown:
                found.append(process.name())
    assert seen > 5, "the processes of the stack were found"
    return found


def answers(url: str, token: str, values: dict[str, str]) -> Iterator[tuple[str, int, bytes]]:
    """Yield path, status, and body of each route that only reads, with ``values`` in its path.

    Routes with other parameters in their path are left out.
    """
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=url, headers=headers, timeout=PATIENCE, trust_env=False) as http:
        for method, path, _ in operations(http):
            names = re.findall(r"\{(\w+)\}", path)
            if method == "get" and values.keys() >= set(names):
                yield (path, *_read(http, path.format(**values)))


def _read(http: httpx.Client, path: str) -> tuple[int, bytes]:
    body = b""
    with http.stream("GET", path) as answer, suppress(httpx.ReadTimeout):
        # Its first byte may take long on a busy machine, but an endless stream is cut.
        answer.request.extensions["timeout"]["read"] = STREAM_SECONDS
        for part in answer.iter_bytes():  # Decompressed: gzip would hide what is searched.
            body += part
    return answer.status_code, body
