"""The REST API: thin routes over the store, described by its own OpenAPI document.

Run as ``python -m vcasgd.api``. The process keeps nothing: any number of them may serve one
ledger, and each may be killed at any moment.
"""

from vcasgd.api.app import create_app

__all__ = ["create_app"]
