#!/usr/bin/env python3
"""Check that the names that docstrings, comments, and documents refer to exist in the package.

    python docs/style/references.py

It checks Sphinx roles (``:meth:`Class.method```) in Python files, and ``Class.attribute`` in
backticks, there and in Markdown, if the class is in the package. Prints a line for each name that
doesn't exist, and exits with status 1 if there are any.
"""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: A record of the past, and this check's own documentation.
EXCLUDED = re.compile(r"^(CHANGELOG\.md|benchmarks/results/|docs/style/)")
ROLE = re.compile(r":(?:py:)?(?:mod|class|meth|func|data|attr|exc|const):`([^`]+)`")
_PYTHONS = {*dir(builtins), *sys.stdlib_module_names}
#: The lookbehind leaves out roles.
CODE = re.compile(r"(?<![:`\w])`{1,2}([A-Z]\w+)\.(\w+)(?:\([^`]*\))?`{1,2}")


class Index:
    """Names of the package: of modules, of what they define or import, and of classes' members."""

    def __init__(self, files: list[Path]) -> None:
        self.modules: dict[str, set[str]] = {}
        #: Class names are unique in the package, so these need no module.
        self.members: dict[str, set[str]] = defaultdict(set)
        self._bases: dict[str, list[str]] = {}
        for file in files:
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            tree = ast.parse(file.read_text())
            self.modules[name] = set(_defined(tree.body)) | set(_imported(tree))
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self.members[node.name] |= set(_members(node))
                    self._bases[node.name] = [_last(base) for base in node.bases]
        for name in list(self.modules):
            parent, _, child = name.rpartition(".")
            self.modules.get(parent, set()).add(child)

    def has(self, target: str, module: str) -> bool:
        """Return whether ``target``, written in ``module``, names something, or isn't ours."""
        if target.startswith("vcasgd"):
            return target in self.modules or any(
                head in self.modules and self._within(head, tail)
                for head, tail in _splits(target.split("."))
            )
        first, _, rest = target.partition(".")
        if first in self.members:
            return not rest or self.has_member(first, rest)
        if first in _PYTHONS or first in self.modules.get(module, {first}):
            return True
        return any(first in members for members in self.members.values())

    def has_member(self, name: str, attribute: str) -> bool:
        """Return whether a class, or a base of it, has an attribute, or a base isn't ours."""
        if attribute.partition(".")[0] in self.members[name]:
            return True
        bases = self._bases.get(name, [])
        return any(base not in self.members or self.has_member(base, attribute) for base in bases)

    def _within(self, module: str, names: list[str]) -> bool:
        if names[0] not in self.modules[module]:
            return False
        return len(names) == 1 or names[0] not in self.members or self.has_member(*names[:2])


def _splits(parts: list[str]) -> Iterator[tuple[str, list[str]]]:
    for length in range(len(parts) - 1, 0, -1):
        yield ".".join(parts[:length]), parts[length:]


def _last(base: ast.expr) -> str:
    """Return the last part of a base's name: ``Model`` for ``spec.Model[int]``."""
    return re.sub(r"\[.*", "", ast.unparse(base)).rpartition(".")[2]


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            yield from (name.id for name in ast.walk(node) if isinstance(name, ast.Name))
        elif isinstance(node, ast.If | ast.Try):
            yield from _defined([*node.body, *node.orelse])


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield (alias.asname or alias.name).partition(".")[0]


def _members(node: ast.ClassDef) -> Iterator[str]:
    yield from _defined(node.body)
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            yield inner.attr
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value  # Of ``__slots__`` and named tuples.


def findings(file: Path, index: Index) -> Iterator[str]:
    """Yield a line for each name in a file that doesn't exist."""
    text = file.read_text()
    path = file.relative_to(ROOT)
    module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    for match in ROLE.finditer(text):
        target = re.sub(r"\s+", "", re.sub(r".*<(.*)>$", r"\1", match[1])).lstrip("~.")
        if not index.has(target.removesuffix("()"), module):
            yield f"{path}:{text.count(chr(10), 0, match.start()) + 1}: there is no {target}"
    for match in CODE.finditer(text):
        if match[1] in index.members and not index.has_member(match[1], match[2]):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{path}:{line}: {match[1]} has no {match[2]}"


def main() -> int:
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.md", "*.lua"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    files = [ROOT / name for name in names if not EXCLUDED.match(name) and (ROOT / name).exists()]
    index = Index([f for f in files if f.suffix == ".py" and f.is_relative_to(ROOT / "vcasgd")])
    found = [finding for file in files for finding in findings(file, index)]
    sys.stdout.writelines(f"{finding}\n" for finding in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
