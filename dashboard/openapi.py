"""Write the API's OpenAPI description, the source of the dashboard's types."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import cast

from pydantic import SecretStr

from vcasgd.api.app import create_app
from vcasgd.settings import Settings
from vcasgd.storage.objects import Storage
from vcasgd.store.connection import connect


def main() -> None:
    # The description needs only the routes; no connection is opened.
    ledger = connect("redis://127.0.0.1:1")
    app = create_app(
        Settings(token=SecretStr("not a secret, only long enough")), ledger, cast("Storage", None)
    )
    Path(sys.argv[1]).write_text(json.dumps(app.openapi(), indent=1) + "\n")


if __name__ == "__main__":
    main()
