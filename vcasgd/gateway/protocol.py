"""First line of a connection to a server behind the gateway."""

from __future__ import annotations

#: Protocol that a TLS client names (ALPN).
PROTOCOL = "vcasgd/1"
#: Longest first line, in bytes.
MAX_LINE_LENGTH = 1024
#: Answer to a first line that is accepted; others are ``-`` and the reason.
ACCEPTED = b"+\n"


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
