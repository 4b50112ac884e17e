"""Commands for API tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from vcasgd.cli.output import (
    Columns,
    Group,
    Json,
    Token,
    Url,
    ago,
    err,
    open_client,
    out,
    show_json,
    show_rows,
    until,
)
from vcasgd.errors import SpecError
from vcasgd.spec.access import MAX_MACHINES, Scope

app = typer.Typer(cls=Group, no_args_is_help=True)

_TOKENS: Columns = {
    "NAME": lambda row: row["name"],
    "SCOPE": lambda row: row["scope"],
    "MACHINES": lambda row: row["max_machines"],
    "USD THIS MONTH": lambda row: _spent(row),
    "POOL": lambda row: row["pool"],
    "CREATED": lambda row: ago(row["created_at"]),
    "LAST USED": lambda row: ago(row["last_used_at"]) or "never",
    "EXPIRES": lambda row: "expired" if row["expired"] else until(row["expires_at"]),
}

TokenName = Annotated[
    str,
    typer.Argument(metavar="NAME", help="User name: lowercase letters, digits, hyphens."),
]


def _spent(row: Mapping[str, Any]) -> str | None:
    budget = row["max_usd_per_month"]
    if budget is None:
        return f"{row['month_usd']:.2f}" if row["month_usd"] else None
    return f"{row['month_usd']:.2f} of {budget:g}"


@app.command()
def create(
    name: TokenName,
    scope: Annotated[Scope | None, typer.Option(help="Permissions of the token.")] = None,
    join: Annotated[
        bool, typer.Option("--join", help="Create a join token: same as --scope join.")
    ] = False,
    pool: Annotated[
        str | None, typer.Option(metavar="POOL", help="Pool to join, with --join.")
    ] = None,
    max_machines: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_MACHINES,
            help="Machine limit: of all jobs of the user; with --join, of joined machines.",
        ),
    ] = None,
    max_usd_per_month: Annotated[
        float | None,
        typer.Option(min=0.01, help="Budget of all jobs of the user in a calendar month (UTC)."),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="Lifetime, such as 12h or 30d (default: never expires).")
    ] = None,
    as_json: Json = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Create an API token, and print it. It can't be shown again.

    Scopes: read (look at everything), submit (also submit jobs, and control its own), admin
    (everything). A token for machines that join (--join) can do nothing else.
    """
    if join:
        scope = Scope.JOIN
    if scope is None:
        raise SpecError(
            "--scope or --join is required",
            remedy="choose --scope read, submit, or admin, or --join",
            field="scope",
        )
    with open_client(url, token) as client:
        created = client.create_token(
            name, scope, max_machines=max_machines, max_usd_per_month=max_usd_per_month,
            expires=expires, pool=pool,
        )  # fmt: skip
    if as_json:
        show_json(created)
        return
    err.print(f"token for {created.name}, scope {created.scope}; it is not shown again:")
    # alone on standard output, for scripts
    out.print(created.token)
    if created.join_url:
        command = f"VCASGD_TOKEN=… vcasgd join {created.join_url}"
        if created.install:
            err.print(f"on each machine, first: {created.install}")
        elif created.not_installable:
            err.print(f"on each machine, install vcasgd first; {created.not_installable}")
        err.print(f"on each machine, with this token: {command}")


@app.command(name="list")
def list_tokens(as_json: Json = False, url: Url = None, token: Token = None) -> None:
    """List API tokens and when each was last used. Their secrets are not stored."""
    with open_client(url, token) as client:
        show_rows(client.tokens(), _TOKENS, as_json=as_json)


@app.command()
def revoke(name: TokenName, url: Url = None, token: Token = None) -> None:
    """Revoke an API token. It stops working within seconds; the user's jobs continue."""
    with open_client(url, token) as client:
        client.revoke_token(name)
    out.print(f"the token {name} is revoked")
