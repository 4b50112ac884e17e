"""Hooks of MkDocs: pages from outside ``docs``, and reference pages from the code.

Every Markdown file of the repository that isn't in ``docs`` becomes a page below ``repository/``,
so that links work on the site as they do between the files. Links to other files become text.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))

import reference  # noqa: E402

#: Folder of the site with pages from outside ``docs``.
OUTSIDE = "repository"
#: Parts of the navigation that have all pages of some folders.
SECTIONS = {"Examples": ("examples/", "terraform/"), "Measurements": ("benchmarks/",)}
#: Place of a generated reference, with the note before it for people who read the file itself.
_MARK = re.compile(r"(?:^.*`make docs` builds .*\n\n)?^<!-- generated: (\w+) -->$", re.MULTILINE)
_FENCE = re.compile(r"^( *```).*?^\1", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(((?!https?:|mailto:|#)[^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Use GitHub's anchors, so that links work on both, and list records and measurements."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = _slug
    parts = {name: entry for entry in config.nav for name in entry}
    records = sorted(Path("docs/adr").glob("*.md"))
    parts["Decisions"]["Decisions"] = [record.relative_to("docs").as_posix() for record in records]
    for title, folders in SECTIONS.items():
        parts[title][title] = [
            f"{OUTSIDE}/{name}" for name in _outside() if name.startswith(folders)
        ]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside, and the images that they show."""
    for name in _outside():
        path = ROOT / name
        files.append(File.generated(config, f"{OUTSIDE}/{name}", content=path.read_text()))
        for _, _, target in _LINK.findall(path.read_text()):
            file = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
            image = file.endswith((".svg", ".png")) and not file.startswith("docs/")
            if image and files.get_file_from_path(f"{OUTSIDE}/{file}") is None:
                at = str(ROOT / file)
                files.append(File.generated(config, f"{OUTSIDE}/{file}", abs_src_path=at))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Insert generated references, and lead links to where their targets are on the site."""
    markdown = _MARK.sub(lambda mark: reference.GENERATED[mark[1]](), markdown)
    return outside_fences(markdown, lambda text: _relinked(text, page.file.src_uri, files))


def outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """Return Markdown with everything changed that isn't in a block of code."""
    parts, at = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [change(markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, change(markdown[at:])])


def _relinked(text: str, page: str, files: Files) -> str:
    source = page.removeprefix(f"{OUTSIDE}/") if page.startswith(f"{OUTSIDE}/") else f"docs/{page}"

    def replaced(link: re.Match[str]) -> str:
        path, hash_, anchor = link[3].partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if target == "docs/README.md" or (ROOT / target / "README.md").is_file():
            target = f"{target.removesuffix('/README.md')}/README.md"
        inside = target.removeprefix("docs/") if target.startswith("docs/") else None
        uri = inside if inside is not None else f"{OUTSIDE}/{target}"
        if files.get_file_from_path(uri) is None:
            known = inside is not None or link[2].startswith("`") or link[2] == target
            return link[2] if known else f"{link[2]} (`{target}`)"
        relative = posixpath.relpath(uri, posixpath.dirname(page) or ".")
        return f"{link[1]}[{link[2]}]({relative}{hash_}{anchor})"

    return _LINK.sub(replaced, text)


def _outside() -> list[str]:
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    return sorted(name for name in names if not name.startswith("docs/") and Path(name).exists())


def _slug(title: str, separator: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", separator)
