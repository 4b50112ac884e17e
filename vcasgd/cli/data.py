"""``vcasgd data``: commands for sharded data sets."""

from __future__ import annotations

from typing import Annotated

import typer

from vcasgd.cli.output import Json, err, out, show_json

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")


@app.callback()
def data() -> None:
    """Prepare sharded data sets."""


@app.command("index")
def index(
    locations: Annotated[
        list[str], typer.Argument(metavar="PATH", help="Folders, or s3:// or gs:// prefixes.")
    ],
    as_json: Json = False,
) -> None:
    """Read all shards (npz, safetensors, tar) of a folder and write its index.json."""
    # Imported here because torch takes seconds to import.
    from vcasgd.data.dataset import storage_at
    from vcasgd.data.shards import make_index

    rows = []
    for location in locations:
        dataset_index = make_index(
            storage_at(location),
            lambda shard: err.print(f"{shard.name}: {shard.samples} samples"),
        )
        samples = sum(shard.samples for shard in dataset_index.shards)
        rows.append({"location": location, "shards": len(dataset_index.shards), "samples": samples})
    if as_json:
        show_json(rows)
        return
    for row in rows:
        out.print(f"{row['location']}: {row['samples']} samples in {row['shards']} shards")
