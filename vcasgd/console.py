"""Terminal output of all commands: what is printed is data, and neither markup nor control."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from vcasgd.printable import printable


class PlainConsole(Console):
    """Console that prints text as it is: no markup, no highlighting, no control characters.

    Styles and layout come from the code that prints only.
    """

    def __init__(
        self, *, stderr: bool = False, width: int | None = None, file: IO[str] | None = None
    ) -> None:
        super().__init__(
            stderr=stderr, width=width, file=file,
            markup=False, highlight=False, emoji=False, soft_wrap=True,
        )  # fmt: skip

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render an object to segments, with printable text."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)
