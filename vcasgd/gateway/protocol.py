"""First line of a connection to a server behind the gateway."""

from __future__ import annotations

import re

#: Protocol that a TLS client names (ALPN).
PROTOCOL = "vcasgd/1"
#: Longest first line, in bytes.
MAX_LINE_LENGTH = 1024
#: Answer to a first line that is accepted; others are ``-`` and the reason.
ACCEPTED = b"+\n"
#: Service of the gateway itself that measures links, and most bytes of one of its requests.
LINK = "link"
MAX_LINK_BYTES = 4 << 20
_LINK_REQUEST = re.compile(rb"(up|down) ([0-9]{1,8})\n")


def first_line(service: str, token: str) -> bytes:
    """Return the line for a service."""
    return f"{service} {token}\n".encode()


def parse(line: bytes) -> tuple[str, str] | None:
    """Return service and token; None if the line is malformed."""
    service, _, token = line.decode(errors="replace").strip().partition(" ")
    return (service, token) if service and token else None


def refusal(reason: str) -> bytes:
    """Return the answer to a first line that is refused."""
    return f"-{reason}\n".encode()


def parse_link_request(line: bytes) -> tuple[str, int] | None:
    """Return direction and bytes of a request; None if the line is none, or asks for too much."""
    match = _LINK_REQUEST.fullmatch(line)
    if match is None or int(match[2]) > MAX_LINK_BYTES:
        return None
    return match[1].decode(), int(match[2])
