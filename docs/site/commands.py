#!/usr/bin/env python3
"""Check and run the commands of the documentation.

    python docs/site/commands.py                  # check each command of each page: seconds
    python docs/site/commands.py --run [PAGE …]   # run those that can run here: minutes

A command of ``vcasgd`` must exist with its options, a target of ``make`` in the Makefile, and a
script or a module of ``python`` in the repository. Pages in ``RUN`` are run as they are, each in a
folder, a home, and a stack of its own; blocks of code with a ``title`` become files there.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer

from vcasgd.cli.commands import app

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


class Setup(NamedTuple):
    """Needs of a page: files of another page, and a command before its own."""

    files: str | None = None
    first: str = ":"


_TRAINED = Setup("README.md", "vcasgd up && vcasgd submit job.yaml --follow")
_STARTED = Setup(None, "vcasgd up")
#: Pages whose commands run here. ``examples`` of the repository is in their folder.
RUN = {
    "README.md": Setup(),
    "docs/tutorial.md": Setup(),
    "docs/reference/rest.md": Setup("README.md", "vcasgd up"),
    "docs/reference/job.md": Setup("README.md", "vcasgd up"),
    "docs/costs.md": _TRAINED,
    "docs/how-to/trackers.md": _TRAINED,
    "docs/how-to/upgrade.md": _TRAINED,
    "examples/digits/README.md": _STARTED,
    "examples/svm/README.md": _STARTED,
    "examples/embeddings/README.md": _STARTED,
    "examples/accelerate/README.md": Setup(),
    "examples/lightning/README.md": Setup(),
    "examples/huggingface/README.md": Setup(),
}
#: Commands that can't run here, or would repeat others, and why.
LEFT_OUT = {
    r"^(git clone|pip install|source )": "this is the installed clone",
    r"^(terraform|aws|gcloud|kubectl|docker|sbatch|sudo|ssh|\$EDITOR)\b": "needs an account",
    r"^make (demo|bench|soak|race|screenshots|test)": "has a test of its own",
    r"^vcasgd (demo|join|exec|ssh|chaos|top)\b": "has a test of its own, or waits for a user",
    r"^vcasgd .*--to (wandb|mlflow|trackio)": "needs an account",
    r"^vcasgd resume": "needs a job that its budget paused",
}
#: Seconds for a page.
PAGE_SECONDS = 900
_BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<kind>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^\1```|"
    r"(?:(?<=\n\n)|\A)(?P<plain>(?: {4}[^\n]*\n|\n(?= {4}))+)",
    re.MULTILINE | re.DOTALL,
)
_PROGRAM = re.compile(
    r"^(?:[A-Z_]+=\S+ )*(vcasgd|make|python3?|pip|curl|export|cp|mv|source|git|"
    r"terraform|aws|gcloud|kubectl|docker|sudo|sbatch|\.venv/bin/\w+)\b"
)


class Block(NamedTuple):
    """A block of code: commands if it has no ``title``, else a file."""

    line: int
    kind: str
    title: str | None
    text: str


def blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of a page: fenced ones, and commands among the indented ones."""
    for match in _BLOCK.finditer(page):
        line = page.count("\n", 0, match.start()) + 1
        if match["plain"] is None:
            indent = len(match["indent"])
            text = "".join(each[indent:] for each in match["text"].splitlines(keepends=True))
            yield Block(line, match["kind"], match["title"], text)
        else:
            text = re.sub(r"^ {4}", "", match["plain"], flags=re.MULTILINE)
            yield Block(line, "plain", None, text)


def commands(page: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each command of a page, continued lines joined."""
    for block in blocks(page):
        if block.title or block.kind not in ("bash", "plain"):
            continue
        whole = block.kind == "bash"
        lines = iter(enumerate(block.text.splitlines(), block.line + whole))
        for number, line in lines:
            text = line
            # A backslash, an open quote, or a text up to a word continues a command.
            while _is_open(text) and (more := next(lines, None)):
                text = f"{text}\n{more[1]}"
            if text.strip() and not text.startswith("#") and (whole or _PROGRAM.match(text)):
                yield number, text


def mentions(page: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each command of ``vcasgd`` within a sentence."""
    prose = _BLOCK.sub(lambda block: "\n" * block[0].count("\n"), page)
    for match in re.finditer(r"`(vcasgd\s[a-z][^`…]*)`", prose):
        yield prose.count("\n", 0, match.start()) + 1, match[1].replace("\n", " ")


def _is_open(text: str) -> bool:
    if here := re.search(r"<<'?(\w+)'?$", text, re.MULTILINE):
        return here[1] not in text.splitlines()[1:]
    if text.endswith("\\"):
        return True
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return True
    return False


# -- checks -------------------------------------------------------------------------------------


def problem(command: str, root: Any, targets: set[str]) -> str | None:
    """Return what is wrong with a command, or None."""
    words = shlex.split(command.replace("…", ""), comments=True)
    while words and re.match(r"^[A-Z_]+=", words[0]):
        words.pop(0)
    program = words[0].rpartition("/")[2] if words else ""
    if program == "vcasgd":
        return _of_vcasgd(words[1:], root)
    if program == "make":
        wrong = [w for w in words[1:] if not w.startswith("-") and "=" not in w]
        return next((f"make has no {each}" for each in wrong if each not in targets), None)
    if program in ("python", "python3") and len(words) > 1:
        file = words[2].replace(".", "/") if words[1] == "-m" else words[1]
        ours = file.partition("/")[0] in ("benchmarks", "vcasgd", "examples", "dashboard", "docs")
        found = [ROOT / file, ROOT / f"{file}.py", ROOT / file / "__main__.py"]
        return f"there is no {file}" if ours and not any(p.exists() for p in found) else None
    return None


def _of_vcasgd(words: list[str], command: Any) -> str | None:
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name = words.pop(0)
        if name == "COMMAND":
            return None
        if name not in command.commands:
            return f"vcasgd has no command {name}"
        command = command.commands[name]
    known = {"--help", "--version"}
    known |= {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    for word in words:
        if word in ("--", "|", "&&", ">"):
            break
        if word.startswith("-") and word.partition("=")[0] not in known:
            return f"{command.name} has no option {word}"
    return None


def pages() -> list[str]:
    """Return the Markdown files under version control that aren't records of the past."""
    shown = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    left_out = ("benchmarks/results/", "CHANGELOG")
    return [name for name in shown if not name.startswith(left_out) and (ROOT / name).exists()]


def check() -> Iterator[str]:
    """Yield a line for each wrong command."""
    root = typer.main.get_command(app)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in pages():
        text = (ROOT / page).read_text()
        for line, command in (*commands(text), *mentions(text)):
            if wrong := problem(command, root, targets):
                yield f"{page}:{line}: {wrong}"


# -- runs ---------------------------------------------------------------------------------------

#: Starts a page's script. ``JOB`` in a command is the job that was submitted last.
PRELUDE = r"""
set -euo pipefail
field() { python -c "import json, sys; print(json.load(sys.stdin)$1)"; }
last_job() { vcasgd jobs --json | field '[0]["id"]'; }
api_url() { field '["api_url"]' < ~/.vcasgd/stack.json; }
"""


def script(page: str, first: str) -> str:
    """Return a script that runs the commands of a page after another one."""
    lines = [PRELUDE, first]
    for number, command in commands(page):
        if any(re.match(pattern, command) for pattern in LEFT_OUT):
            continue
        text = command.replace("http://127.0.0.1:8700", "$(api_url)")
        if not text.startswith("JOB="):
            text = re.sub(r"(?<![\w$.-])JOB\b(?!=)", '"$(last_job)"', text)
        else:
            text = "JOB=$(last_job)"
        lines += [f"echo {shlex.quote(f'line {number}: {command}')}", text]
    return "\n".join([*lines, ""])


def run(page: str) -> bool:
    """Run a page in a folder of its own, and return whether all commands succeeded."""
    with tempfile.TemporaryDirectory(prefix="docs-") as folder:
        text = (ROOT / page).read_text()
        there = Path(folder) / "work"
        ignored = shutil.ignore_patterns("data", "__pycache__")
        shutil.copytree(ROOT / "examples", there / "examples", ignore=ignored)
        other = RUN[page].files
        found = [*(blocks((ROOT / other).read_text()) if other else ()), *blocks(text)]
        for block in found:
            if block.title:
                # Pages with files of another one are read in the folder of a job.
                path = Path(Path(block.title).name if other else block.title)
                (there / path).parent.mkdir(exist_ok=True)
                (there / path).write_text(block.text)
        own = {
            **{k: v for k, v in os.environ.items() if not k.startswith("VCASGD_")},
            "HOME": folder,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "VCASGD_API_PORT": "0",
        }
        began = time.monotonic()
        source = script(text, RUN[page].first)
        try:
            done = subprocess.run(
                ["bash", "-c", source], cwd=there, env=own, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
                timeout=PAGE_SECONDS,
            )  # fmt: skip
            ok, said = done.returncode == 0, done.stdout
        except subprocess.TimeoutExpired as late:
            ok, said = False, f"{late.stdout!s}\nnot ready within {PAGE_SECONDS} s"
        finally:
            subprocess.run([BIN / "vcasgd", "down"], env=own, capture_output=True, check=False)
    print(f"{'ok    ' if ok else 'FAILED'} {page}, {time.monotonic() - began:.0f} s", flush=True)
    if not ok:
        print(said[-6000:])
    return ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="store_true", help="also run the pages that can run here")
    parser.add_argument("page", nargs="*", help="pages to run (default: all)")
    options = parser.parse_args()
    wrong = list(check())
    print(*wrong, sep="\n", end="\n" if wrong else "")
    failed = [page for page in options.page or RUN if not run(page)] if options.run else []
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    sys.exit(main())
