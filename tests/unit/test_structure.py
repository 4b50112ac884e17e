"""Rules about the source tree that no linter checks."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import grimp
import pytest

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "vcasgd"


def test_no_class_name_is_used_twice() -> None:
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")

    repeated = {name: where for name, where in places.items() if len(where) > 1}

    assert len(places) > 300, "the package was found"
    assert repeated == {}


def test_no_import_cycle_at_run_time() -> None:
    graph = grimp.build_graph("vcasgd", exclude_type_checking_imports=True, cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}

    assert len(imports) > 100, "the package was found"
    # Raises CycleError, which names the modules of a cycle.
    list(graphlib.TopologicalSorter(imports).static_order())


def test_no_two_files_of_tests_have_one_name() -> None:
    """Pytest imports them as top-level modules."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))

    assert len(names) > 100, "the tests were found"
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(
    ("process", "unused"),
    [
        ("cli", ("torch", "fastapi", "ray")),
        ("api.app", ("torch", "ray")),
        ("controller.main", ("torch", "fastapi")),
        ("stack.__main__", ("torch", "fastapi", "ray")),
    ],
)
def test_process_does_not_import_what_it_does_not_use(
    process: str, unused: tuple[str, ...]
) -> None:
    """Torch alone takes two seconds and 170 MB of memory."""
    program = f"import sys, vcasgd.{process}; print([x for x in {unused} if x in sys.modules])"

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )

    assert done.stdout == "[]\n"
