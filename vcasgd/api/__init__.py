"""The REST API: thin routes over the store, described by an OpenAPI document.

Run it with ``python -m vcasgd.api``. The process keeps no state: several may serve one ledger, and
each may be killed at any time.
"""

from vcasgd.api.app import create_app

__all__ = ["create_app"]
