"""The package itself, as a wheel: machines that join install the version of the stack from it.

It is packed from what this process runs, a checkout or an installation, and always has the same
bytes for the same files. The digest is in the command that comes with a token for joining.
"""

from __future__ import annotations

import hashlib
import io
import re
import shlex
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit

from fastapi import APIRouter, Response
from fastapi.responses import RedirectResponse, StreamingResponse

import vcasgd
from vcasgd.api.problems import documented
from vcasgd.errors import NotFound

PATH = "/wheel"
#: Type that is not compressed again.
MEDIA_TYPE = "application/zip"
NAME = f"vcasgd-{vcasgd.__version__}-py3-none-any.whl"
#: Files of the package by their endings: others in a checkout are none of a machine's business.
ENDINGS = frozenset(
    {".py", ".lua", ".c", ".json", ".typed", ".html", ".js", ".css", ".svg", ".yaml", ".md"}
)
#: What ``vcasgd demo`` trains, in the package.
EXAMPLE = "_examples/digits"
#: Bytes that are sent at a time, so that a client that reads slowly takes little memory.
CHUNK = 1 << 16
#: Files of the installed metadata that a wheel has, too.
_METADATA = ("METADATA", "entry_points.txt", "licenses/LICENSE")
_WHEEL = "Wheel-Version: 1.0\nGenerator: vcasgd\nRoot-Is-Purelib: true\nTag: py3-none-any\n"

router = APIRouter(tags=["wheel"])


@router.get(PATH, status_code=307, response_class=RedirectResponse, responses=documented(404, 500))
def get_wheel() -> str:
    """Redirect to the wheel of this version; pip needs its name in the address."""
    wheel()
    return f"{PATH}/{NAME}"


@router.get(
    f"{PATH}/{{name}}",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "The wheel. Its SHA-256 is the `ETag`.",
            "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        },
        **documented(404, 422, 500),
    },
)
def get_wheel_file(name: str) -> Response:
    """Download the package that this stack runs, for machines that join. It needs no token."""
    if name != NAME:
        raise NotFound(f"this stack has {NAME} only", remedy="ask for the present command")
    content, digest = wheel()
    headers = {"Content-Length": str(len(content)), "ETag": f'"{digest}"'}
    parts = (content[at : at + CHUNK] for at in range(0, len(content), CHUNK))
    return StreamingResponse(parts, headers=headers, media_type=MEDIA_TYPE)


def install_command(url: str, *, own_certificate: bool) -> str:
    """Return the command of pip for machines that reach the stack at a URL.

    With ``own_certificate``, pip can't verify the stack's certificate; the digest is enough.
    Raises :class:`NotFound` if this installation can't be packed.
    """
    address = f"{url.rstrip('/')}{PATH}/{NAME}#sha256={wheel()[1]}"
    source = shlex.quote(f"vcasgd[worker] @ {address}")
    trust = f" --trusted-host {urlsplit(url).netloc}" if own_certificate else ""
    return f"pip install{trust} {source}"


@cache
def wheel() -> tuple[bytes, str]:
    """Return the wheel and its SHA-256. Raises :class:`NotFound` with what is missing."""
    info = f"vcasgd-{vcasgd.__version__}.dist-info"
    files = {**dict(_package()), **{f"{info}/{name}": text for name, text in _metadata()}}
    files[f"{info}/WHEEL"] = _WHEEL.encode()
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            # The default time is constant, which keeps the digest.
            entry = zipfile.ZipInfo(name)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, content)
    content = packed.getvalue()
    return content, hashlib.sha256(content).hexdigest()


def _package() -> Iterator[tuple[str, bytes]]:
    root = Path(vcasgd.__file__).parent
    for path in sorted(root.rglob("*")):
        if path.suffix in ENDINGS and path.is_file() and not path.is_symlink():
            yield f"vcasgd/{path.relative_to(root).as_posix()}", path.read_bytes()
    # A checkout has the examples beside the package, an installation inside it.
    if not (root / EXAMPLE).exists():
        for path in sorted((root.parent / "examples/digits").glob("*")):
            if path.is_file():
                yield f"vcasgd/{EXAMPLE}/{path.name}", path.read_bytes()


def _metadata() -> Iterator[tuple[str, bytes]]:
    try:
        installed = distribution("vcasgd")
    except PackageNotFoundError as error:
        raise NotFound(
            "this stack can't pack its wheel: vcasgd is not installed here, only on the path",
            remedy="install it where the stack runs: pip install -e FOLDER, or from a wheel",
        ) from error
    for name in _METADATA:
        if (text := installed.read_text(name)) is not None:
            # A checkout may have another version than when it was installed.
            version = f"\nVersion: {vcasgd.__version__}\n"
            yield name, re.sub(r"\nVersion: .*\n", version, text, count=1).encode()


def _record(files: dict[str, bytes], own: str) -> bytes:
    rows = []
    for name, content in files.items():
        digest = urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(content)}\n")
    return "".join([*rows, f"{own},,\n"]).encode()
