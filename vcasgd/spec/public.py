"""Public parts of a cluster: titles of jobs on the page for volunteers, and nicknames there."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints, TypeAdapter, ValidationError

from vcasgd.errors import SpecError
from vcasgd.spec.strict import StrictModel

#: Word in place of a nickname for a person who has none, or wants none any more.
ANONYMOUS = "anonymous"
#: Letters of a nickname; it is one line of a table on a phone.
MAX_NICKNAME_LENGTH = 24


def _printable(text: str) -> str:
    # Control characters and those that change the direction of text are not printable.
    if not text.isprintable():
        raise ValueError("must be one line of printable characters")
    return text


PublicText = Annotated[str, StringConstraints(strip_whitespace=True), AfterValidator(_printable)]
#: Nickname of a volunteer. Strangers choose it and everyone sees it, so it has no character that
#: means something in HTML, in an address, or in a terminal.
Nickname = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9]+([ _-][A-Za-z0-9]+)*$", max_length=MAX_NICKNAME_LENGTH)
]
_NICKNAME: TypeAdapter[str] = TypeAdapter(Nickname)


class Public(StrictModel):
    """Texts of a job on the public page for volunteers, if the cluster has one."""

    title: PublicText = Field(min_length=1, max_length=100)
    description: PublicText = Field(default="", max_length=1000)


def parse_nickname(text: str) -> str:
    """Return a nickname. Raises :class:`SpecError`."""
    try:
        return _NICKNAME.validate_python(text)
    except ValidationError as error:
        raise SpecError(
            f"nickname: {text[:MAX_NICKNAME_LENGTH]!r} can't be used",
            remedy=f"use up to {MAX_NICKNAME_LENGTH} letters (a-z, A-Z) and digits, with single "
            "spaces, dashes, or underscores between them",
            field="nickname",
        ) from error
