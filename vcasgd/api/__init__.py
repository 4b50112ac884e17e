"""The REST API: thin routes over the store, described by an OpenAPI document.

Run it with ``python -m vcasgd.api``. The process keeps no state: several may serve one ledger, and
each may be killed at any time.
"""

from pathlib import Path

#: Output folder of `make dashboard`.
STATIC = Path(__file__).parent / "static"
