"""The webhook of a controller as a process of its own, which a test can kill."""

from __future__ import annotations

from vcasgd.controller.webhook import Webhook
from vcasgd.logging import configure_logging
from vcasgd.settings import load_settings
from vcasgd.store.connection import connect


def main() -> int:
    configure_logging("webhook")
    settings = load_settings()
    Webhook(settings, connect(settings.required("ledger_url")), lambda: True).work()
    return 0
