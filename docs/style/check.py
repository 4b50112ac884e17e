#!/usr/bin/env python3
"""Check the prose of the repository: documentation, docstrings, comments, and interface texts.

    python docs/style/check.py [PATH ...]

Prints one line for each finding, with the rule and a suggestion, and exits with status 1 if there
are any. Without paths it checks every tracked file. The rules are in docs/style/README.md.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
#: Records of the past, quoted output, third-party text, and this check's own word list.
EXCLUDED = re.compile(r"^(LICENSE|benchmarks/results/|docs/style/|.*package-lock\.json|.*/static/)")
WORDS = {
    re.compile(pattern, re.IGNORECASE): instead
    for pattern, instead in tomllib.loads((HERE / "words.toml").read_text())["words"].items()
}
#: A docstring starts with a noun phrase or an imperative, not with a relative clause.
OPENING = re.compile(
    r"(Of|What|Whatever|Whether|With which|Who|Whoever|That|Where|How|Which|So that|Until)\b"
)
#: "Who has a token may …": a clause as a subject. Questions are fine.
SUBJECT_CLAUSE = re.compile(r"(?:^|[.;:|] +)(Who(?:ever)? [a-z][^.?;|]*)[.;|]")
#: Shorter string literals are names, not sentences.
FEWEST_WORDS = 3


class Text(NamedTuple):
    """A piece of prose and the line it starts on."""

    line: int
    text: str
    docstring: bool = False


class Finding(NamedTuple):
    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.message}"


def check(path: Path) -> list[Finding]:
    """Return the findings in one file. Raises SyntaxError for Python that does not parse."""
    extract = EXTRACTORS.get(path.suffix)
    if extract is None:
        return []
    return [
        Finding(path, piece.line + offset, message)
        for piece in extract(path.read_text())
        for offset, message in problems(piece)
    ]


def problems(piece: Text) -> Iterator[tuple[int, str]]:
    """Yield the line offset and the message of each problem in a piece of prose."""
    prose = without_code(piece.text)
    if piece.docstring:
        if opening := OPENING.match(prose):
            yield 0, f"docstring opens with {opening[0]!r}: use a noun phrase or an imperative"
        if not re.search(r"[.:!?)`]\s*(\n|$)", prose.strip().split("\n\n")[0]):
            yield 0, "the first paragraph of a docstring ends with a period"
    for clause in SUBJECT_CLAUSE.finditer(prose):
        yield prose.count("\n", 0, clause.start(1)), f"clause as a subject: {clause[1][:50]!r}"
    flat = re.sub(r"\s", " ", prose)
    for pattern, instead in WORDS.items():
        for match in pattern.finditer(flat):
            yield prose.count("\n", 0, match.start()), f"{match[0]!r}: use {instead}"


def without_code(text: str) -> str:
    """Blank out literals, references, and links' targets, and keep the line breaks."""
    return re.sub(
        r"``[^`]+``|:\w+:`[^`]*`|`[^`]+`|\]\([^)]*\)",
        lambda code: re.sub(r"[^\n]", "_", code[0]),
        text,
    )


def python(source: str) -> Iterator[Text]:
    """Yield docstrings, sentences in string literals, and comments."""
    docstrings = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                first = node.body[0]
                assert isinstance(first, ast.Expr)
                docstrings.add(id(first.value))
                yield Text(first.lineno, text, docstring=True)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
            and len(node.value.split()) >= FEWEST_WORDS
        ):
            yield Text(node.lineno, node.value)
    yield from python_comments(source)


def python_comments(source: str) -> Iterator[Text]:
    """Yield each block of comment lines as one piece."""
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if block and token.start[0] != last + 1:
            yield Text(first, "\n".join(block))
            block = []
        if not block:
            first = token.start[0]
        last = token.start[0]
        block.append(token.string.lstrip("#: "))
    if block:
        yield Text(first, "\n".join(block))


def markdown(source: str) -> Iterator[Text]:
    """Yield paragraphs and table rows, without fenced and indented code."""
    fenced = False
    paragraph: list[str] = []
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        is_code = fenced or line.startswith("    ") or line.lstrip().startswith("```")
        if line.strip() and not is_code and not line.lstrip().startswith("|"):
            paragraph.append(line)
            continue
        if paragraph:
            yield Text(number - len(paragraph), "\n".join(paragraph))
            paragraph = []
        if line.lstrip().startswith("|") and not is_code:
            yield Text(number, line)


def typescript(source: str) -> Iterator[Text]:
    """Yield comments, JSX text, and sentences in string literals."""
    for number, line in enumerate(source.splitlines(), 1):
        for text in re.findall(
            r'//\s*(.*)|^\s*/?\*+\s*(.*)|"([^"]+)"|`([^`]+)`|>([^<>{}]+)<', line
        ):
            piece = next((part for part in text if part), "")
            if len(piece.split()) >= FEWEST_WORDS:
                yield Text(number, piece)
        if re.fullmatch(r"\s*[A-Z][^;={}<>()]*[a-z.,]\s*", line):
            yield Text(number, line.strip())


def hash_comments(source: str) -> Iterator[Text]:
    """Yield comments of shell scripts, YAML, TOML, and Terraform, and Terraform descriptions."""
    for number, line in enumerate(source.splitlines(), 1):
        if comment := re.search(r"(?:^|\s)#\s?(.*)", line):
            yield Text(number, comment[1])
        elif text := re.search(r'(?:description|error_message|summary)\s*[=:]\s*"?([^"]+)', line):
            yield Text(number, text[1])


def lua(source: str) -> Iterator[Text]:
    """Yield comments."""
    for number, line in enumerate(source.splitlines(), 1):
        if comment := re.search(r"--\s?(.*)", line):
            yield Text(number, comment[1])


EXTRACTORS: dict[str, Callable[[str], Iterator[Text]]] = {
    ".py": python,
    ".md": markdown,
    ".ts": typescript,
    ".tsx": typescript,
    ".lua": lua,
    **dict.fromkeys((".tf", ".yaml", ".yml", ".toml", ".sh", ".hcl", ".conf"), hash_comments),
}


def tracked_files() -> list[Path]:
    """Return the files under version control, without the excluded ones."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    paths = [ROOT / name for name in names if not EXCLUDED.match(name)]
    return [path for path in paths if path.is_file()]


def main(arguments: list[str]) -> int:
    paths = [Path(argument).resolve() for argument in arguments] or tracked_files()
    files = [
        file
        for path in paths
        for file in ([path] if path.is_file() else sorted(path.rglob("*")))
        if file.is_file()
    ]
    findings = [finding for file in files for finding in check(file)]
    for finding in findings:
        print(finding)
    if findings:
        print(f"{len(findings)} findings; docs/style/README.md explains the rules")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
