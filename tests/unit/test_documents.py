"""Links and paths in the documentation lead somewhere, its tests run, and its limits are ours."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from vcasgd import limits

REPOSITORY = Path(__file__).parents[2]
DOCUMENTS = ("SECURITY.md", "docs/guarantees.md", "docs/security.md")
#: A file of tests, and optionally a test or a class in it; "…" stands for the file named before.
#: A dagger marks a long test.
REFERENCE = re.compile(r"(tests/[\w/]+\.py|…)((?:::\w+)*)(`†)?")
#: Marks of tests that `make test` leaves out; see tests/conftest.py.
LONG = "(extended|ci)"


def references(document: str) -> Iterator[tuple[str, str, bool]]:
    """Yield each file and test ("" for the whole file) that a document names, and whether it says
    that `make test` runs it.
    """
    file = ""
    for match in REFERENCE.finditer((REPOSITORY / document).read_text()):
        path, test = match[1], match[2].removeprefix("::")
        if path == "…" and not test:
            continue
        file = file if path == "…" else path
        yield file, test, not match[3]


@cache
def runs_in_make_test(file: str) -> dict[str, bool]:
    """Map each test and test class of a file to True if `make test` runs it."""
    tree = ast.parse((REPOSITORY / file).read_text())
    marks = [
        ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    return dict(_each_test(tree.body, "", _is_long(marks)))


def _each_test(body: list[ast.stmt], prefix: str, long: bool) -> Iterator[tuple[str, bool]]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            own = long or _is_long(map(ast.unparse, node.decorator_list))
            yield prefix + node.name, not own
            if isinstance(node, ast.ClassDef):
                yield from _each_test(node.body, f"{prefix}{node.name}::", own)


def _is_long(marks: Iterator[str] | list[str]) -> bool:
    """Return True if all of a test is long, not only some of its parameters."""
    return any(re.search(rf"mark\.{LONG}\b", each) and "param" not in each for each in marks)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_each_named_test_exists_and_runs(document: str) -> None:
    named = list(references(document))
    missing, wrong = [], []
    for file, test, without_dagger in named:
        if not (REPOSITORY / file).is_file():
            missing.append(file)
            continue
        runs = runs_in_make_test(file)
        if test and test not in runs:
            missing.append(f"{file}::{test}")
        elif (runs[test] if test else any(runs.values())) != without_dagger:
            wrong.append(f"{file}::{test}")

    assert len(named) > 10, "the document was read"
    assert missing == []
    assert wrong == []


# --- links and paths ----------------------------------------------------------------------------

PAGES = sorted(
    REPOSITORY / name
    for name in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=REPOSITORY, check=True, capture_output=True, text=True,
    ).stdout.splitlines()
)  # fmt: skip
#: Folders that a path in a page may be relative to.
BASES = ("", "vcasgd", "vcasgd/store", "docs", "terraform")
#: Files of a user's job, of a stack's home, and of a cloud's machine.
NOT_OURS = re.compile(r"^(train\.py|script\.py|job\.yaml|model\.safetensors|.*[<…*{$].*|/.*|~.*)$")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_anchors_and_paths_exist(page: Path) -> None:
    text = page.read_text()
    broken = []
    for target in re.findall(
        r"\]\((?!https?:|mailto:)([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    ):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    bases = [*(REPOSITORY / base for base in BASES), page.parent]
    broken += [
        path
        for path in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|lua|ts|tsx|yaml|tf))(?:`|::)", text)
        if not NOT_OURS.match(path) and not any((base / path).exists() for base in bases)
    ]

    assert broken == []


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


# --- limits -------------------------------------------------------------------------------------

ROWS = [
    row.strip("|").split(" | ")
    for row in (REPOSITORY / "docs/security.md")
    .read_text()
    .partition("\n## Limits\n")[2]
    .partition("\n## ")[0]
    .splitlines()
    if row.startswith("|")
][2:]
CONSTANTS = {name for name in vars(limits) if name.isupper()}


def test_each_limit_has_a_row_that_names_it_and_a_test() -> None:
    named = {name for row in ROWS for name in re.findall(r"`([A-Z_]+)`", row[1])}

    assert named == CONSTANTS
    assert [row[0] for row in ROWS if "::test_" not in row[3]] == []
