"""The page ``/api/docs``: the OpenAPI document as HTML, without scripts and other files."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

PATH = "/api/docs"
#: Addresses where people look for such a page, or for the document.
USUAL = ("/docs", "/redoc")

_STYLE = """
:root { color-scheme: light dark; --line: light-dark(#d7dce2, #353b45);
  --soft: light-dark(#f4f6f8, #1d2229); --link: light-dark(#0a58ca, #7ab7ff) }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 66rem; margin: 0 auto; padding: 1rem }
a { color: var(--link) } code { font-family: ui-monospace, monospace; font-size: .9em }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line) } h3 { margin: 1.6rem 0 .3rem }
h3 code, td code, pre { overflow-wrap: anywhere; white-space: pre-wrap }
.method { display: inline-block; min-width: 4.2rem; font-weight: 600 }
nav ul { columns: 3 16rem; padding-left: 1.2rem } p { margin: .3rem 0 }
table { border-collapse: collapse; width: 100%; margin: .5rem 0; table-layout: fixed }
td { border: 1px solid var(--line); padding: .3rem .5rem; vertical-align: top;
  overflow-wrap: anywhere }
td:first-child { width: 24% } td:nth-child(2) { width: 28% } pre { background: var(--soft);
  padding: .6rem }
"""
_EXAMPLE = escape('curl -H "Authorization: Bearer $VCASGD_TOKEN" http://127.0.0.1:8700/api/v1/jobs')


def page(document: Mapping[str, Any]) -> str:
    groups = routes(document)
    schemas = document["components"]["schemas"]
    info = document["info"]
    body = [
        f"<h1>{escape(info['title'])} {escape(info['version'])}: REST API</h1>",
        f"<p>{_prose(info.get('summary', ''))} The same as a document for generators: ",
        '<a href="/api/v1/openapi.json">/api/v1/openapi.json</a>. <a href="/">Dashboard</a>.</p>',
        f"<pre>{_EXAMPLE}</pre>",
        "<nav><ul>",
        *(f'<li><a href="#tag-{escape(tag)}">{escape(tag)}</a></li>' for tag in groups),
        '<li><a href="#schemas">schemas</a></li></ul></nav>',
        *(
            f'<h2 id="tag-{escape(tag)}">{escape(tag.capitalize())}</h2>{group(rows)}'
            for tag, rows in groups.items()
        ),
        '<h2 id="schemas">Schemas</h2>',
        *(part for name in sorted(schemas) for part in _schema(name, schemas[name])),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>vcasgd: REST API</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>"
    )


def routes(document: Mapping[str, Any]) -> Mapping[str, list[tuple[str, str, Any]]]:
    """Return method, path, and operation of each route, by the route's first tag."""
    groups: defaultdict[str, list[tuple[str, str, Any]]] = defaultdict(list)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            groups[operation.get("tags", ["other"])[0]].append((method.upper(), path, operation))
    return groups


def group(rows: Sequence[tuple[str, str, Any]]) -> str:
    """Return the HTML of some routes."""
    return "".join(_group(rows))


def schema(name: str, content: Mapping[str, Any]) -> str:
    """Return the HTML of a schema."""
    return "".join(_schema(name, content))


def _group(rows: Sequence[tuple[str, str, Any]]) -> Iterator[str]:
    for method, path, operation in rows:
        yield f'<h3><span class="method">{method}</span> <code>{escape(path)}</code></h3>'
        yield f"<p>{_prose(operation.get('description') or operation.get('summary', ''))}</p>"
        ways = [way for each in operation.get("security", ()) for way in each.items()]
        if ways:
            names = " or a ".join(dict.fromkeys(escape(name) for name, _ in ways))
            scopes = ", ".join(dict.fromkeys(escape(each) for _, all_ in ways for each in all_))
            yield f"<p>Needs a {names}{f' with scope {scopes}' if scopes else ''}.</p>"
        parameters = [_row(each["name"], each) for each in operation.get("parameters", ())]
        bodies = operation.get("requestBody", {}).get("content", {})
        parameters += [_row("body", content) for content in bodies.values()]
        answers = [
            f"<tr><td>{escape(status)}</td><td>{_answer(answer)}</td>"
            f"<td>{_prose(answer.get('description', ''))}</td></tr>"
            for status, answer in operation["responses"].items()
        ]
        yield from _table(parameters)
        yield from _table(answers)


def _schema(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f'<h3 id="schema-{escape(name)}"><code>{escape(name)}</code></h3>'
    yield f"<p>{_prose(schema.get('description', ''))}</p>"
    if "properties" not in schema:
        yield f"<p>{_type(schema)}</p>"
    needed = schema.get("required", ())
    yield from _table(
        _row(name + ("" if name in needed else "?"), {"schema": each, **each})
        for name, each in schema.get("properties", {}).items()
    )


def _table(rows: Any) -> Iterator[str]:
    if text := "".join(rows):
        yield f"<table>{text}</table>"


def _row(name: str, field: Mapping[str, Any]) -> str:
    text = _prose(field.get("description", ""))
    return (
        f"<tr><td><code>{escape(name)}</code></td>"
        f"<td>{_type(field.get('schema', {}))}</td><td>{text}</td></tr>"
    )


def _answer(answer: Mapping[str, Any]) -> str:
    contents = answer.get("content", {})
    return ", ".join(
        _type(content.get("schema", {})) or f"<code>{escape(kind)}</code>"
        for kind, content in contents.items()
    )


def _type(schema: Mapping[str, Any]) -> str:
    """Return the type of a value in a few words, with links to schemas."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#schema-{name}">{name}</a>'
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(map(_type, schema[key])))
    if "enum" in schema:
        return ", ".join(f"<code>{escape(str(each))}</code>" for each in schema["enum"])
    if "const" in schema:
        return f"<code>{escape(str(schema['const']))}</code>"
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {})) or 'any'}"
    if isinstance(values := schema.get("additionalProperties"), Mapping):
        return f"object of {_type(values) or 'any'}"
    return escape(str(schema.get("format") or schema.get("type") or ""))


def _prose(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(" ".join(text.split())))
