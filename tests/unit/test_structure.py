"""Rules about the source tree that no linter checks."""

from __future__ import annotations

import graphlib
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import grimp
import pytest

PACKAGE = Path(__file__).parents[2] / "vcasgd"


def test_no_class_name_is_used_twice() -> None:
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in re.findall(r"^ *class (\w+)[(:[]", path.read_text(), re.MULTILINE):
            places[name].append(str(path.relative_to(PACKAGE)))

    repeated = {name: where for name, where in places.items() if len(where) > 1}

    assert len(places) > 300, "the package was found"
    assert repeated == {}


def test_no_import_cycle_at_run_time() -> None:
    graph = grimp.build_graph("vcasgd", exclude_type_checking_imports=True, cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}

    assert len(imports) > 100, "the package was found"
    # Raises CycleError, which names the modules of a cycle.
    list(graphlib.TopologicalSorter(imports).static_order())


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
