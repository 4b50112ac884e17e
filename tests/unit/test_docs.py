"""Links, paths, and anchors in the documentation lead somewhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()
)  # fmt: skip
#: Folders that a path in a page may be relative to.
BASES = ("", "vcasgd", "vcasgd/store", "docs", "terraform")
#: Files of a user's job, of a stack's home, and of a cloud's machine.
NOT_OURS = re.compile(r"^(train\.py|script\.py|job\.yaml|model\.safetensors|.*[<…*{$].*|/.*|~.*)$")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_in_pages_exist(page: Path) -> None:
    paths = re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|lua|ts|tsx|yaml|tf))(?:`|::)", page.read_text())
    bases = [*(ROOT / base for base in BASES), page.parent]
    missing = [
        path
        for path in paths
        if not NOT_OURS.match(path) and not any((base / path).exists() for base in bases)
    ]
    assert missing == []


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}
