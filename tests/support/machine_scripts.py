"""Script that a machine in a cloud would run."""

from __future__ import annotations

import email


def script_of(user_data: str) -> str:
    """Return the platform's script: the last part of the user data."""
    parts = email.message_from_string(user_data).get_payload()
    assert isinstance(parts, list)
    return str(parts[-1].get_payload())
