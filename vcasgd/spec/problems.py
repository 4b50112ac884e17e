"""Errors in what people write, each with the field and a remedy."""

from __future__ import annotations

import difflib
import re
import reprlib
import textwrap
from collections.abc import Iterable
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from vcasgd.errors import SpecError
from vcasgd.spec.update import RULES
from vcasgd.spec.values import PATTERNS

#: Errors of other fields in one message.
MAX_OTHERS = 5
#: Characters of a field in a message about what a program wrote.
MAX_FIELD = 64
#: Writes the beginning of a value: lists in lists can have more values than memory holds.
_BEGINNING = reprlib.Repr()
_BEGINNING.maxlevel, _BEGINNING.maxstring, _BEGINNING.maxother = 3, 60, 60
#: Plain text for pydantic's error types.
_KINDS = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "dict_type": "must be a mapping",
    "missing": "is required",
    "extra_forbidden": "there is no such field",
}


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """Return a remedy that names what resembles a misspelled name; None if nothing does."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]}?" if close else None


def spec_error(error: ValidationError, model: type[BaseModel]) -> SpecError:
    """Convert a pydantic error: the first invalid field, and then the others.

    A misspelled field comes first, because it explains why another one is missing.
    """
    first, *others = sorted(spec_errors(error, model), key=lambda one: not _is_misspelled(one))
    more = [
        f"{one.message} ({one.remedy})" if _is_misspelled(one) else one.message
        for one in others[:MAX_OTHERS]
    ]
    more += [f"and {len(others) - MAX_OTHERS} more"] if len(others) > MAX_OTHERS else []
    return SpecError("; ".join([first.message, *more]), remedy=first.remedy, **first.details)


def _is_misspelled(error: SpecError) -> bool:
    return (error.remedy or "").startswith("did you mean")


def expected(details: ErrorDetails) -> str:
    """Return what a value has to be, such as "must be a whole number", by an error of pydantic."""
    if words := PATTERNS.get(details.get("ctx", {}).get("pattern", "")):
        return f"must be {words}"
    return _KINDS.get(details["type"], plain_problem(details["msg"]))


def plain_problem(message: str) -> str:
    """Return a message of pydantic in the words of ours."""
    return re.sub("^[A-Z][a-z]+ should ", "must ", message.removeprefix("Value error, "))


def first_mistake(error: ValidationError, whole: str = "") -> str:
    """Return the first mistake in what a program wrote, with its field.

    ``whole`` stands for a field if all of it is wrong.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    # Programs choose the names of unknown fields.
    where = ".".join(map(str, first["loc"]))[:MAX_FIELD] or whole
    return f"{where}: {expected(first)}" if where else expected(first)


def spec_errors(error: ValidationError, model: type[BaseModel]) -> list[SpecError]:
    """Convert a pydantic error to one error for each invalid field."""
    return [
        _secrets_error(one) if one["loc"][:1] == ("secrets",) else _spec_error(one, model)
        for one in by_field(error.errors(include_url=False))
    ]


def by_field(found: Iterable[ErrorDetails]) -> list[ErrorDetails]:
    """Join the errors of a field that can have values of several kinds.

    pydantic has one for each, and adds the kind to the path, such as ``constrained-int``.
    """
    fields: dict[tuple[int | str, ...], ErrorDetails] = {}
    for details in found:
        path = details["loc"]
        kind = str(path[-1]) if path else ""
        if not kind.startswith(("literal[", "str-enum[", "constrained-")):
            fields[path] = details
        elif (first := fields.get(path[:-1])) is None:
            fields[path[:-1]] = {**details, "loc": path[:-1]}
        else:
            first["msg"] = f"{expected(first)} or {expected(details).removeprefix('must be ')}"
            first["type"] = "union"
    return list(fields.values())


def _spec_error(details: ErrorDetails, model: type[BaseModel]) -> SpecError:
    path = details["loc"]
    # pydantic adds the tag of a discriminated union to the path, which is no level of the file
    field = ".".join(str(part) for part in path if part not in RULES and part != "[key]")
    remedy = None
    match details["type"]:
        case "extra_forbidden" if rules := _rules_with(path):
            message = f"the rule {path[-2]} has no such field"
            remedy = f"remove it, or choose a rule that has it: {', '.join(rules)}"
        case "extra_forbidden":
            message = "there is no such field"
            known = sorted(_fields_at(model, path[:-1]))
            remedy = did_you_mean(str(path[-1]), known) or f"known fields: {', '.join(known)}"
        case "union_tag_invalid":
            field = f"{field}.rule"
            message = f"unknown rule {details['ctx']['tag']!r}"
            remedy = f"choose one of {details['ctx']['expected_tags']}"
        case "missing":
            message = "is required"
        case "string_pattern_mismatch" if field == "task":
            message = f"{details['input']!r} is neither module:Class nor a script of working_dir"
            remedy = "for example train:MyTask, or train.py"
        case "length":
            field, message = details["ctx"]["field"], details["ctx"]["problem"]
            remedy = details["ctx"]["remedy"]
        case _:
            message, remedy = _value_problem(details, model)
    field = field or "job"
    return SpecError(f"{field}: {message}", remedy=remedy, field=field)


def _value_problem(details: ErrorDetails, model: type[BaseModel]) -> tuple[str, str | None]:
    """Return the message and the remedy of a value of the wrong kind or size."""
    if details["type"] == "value_error":
        return expected(details), None
    value = textwrap.shorten(_BEGINNING.repr(details["input"]), 60, placeholder=" …")
    match details["type"]:
        case "model_type" | "model_attributes_type":
            known = ", ".join(_fields_at(model, details["loc"]))
            return f"must be a mapping of fields, not {value}", f"its fields: {known}"
        case "tuple_type" | "too_short":
            return f"must be a list of at least one item, not {value}", None
        case _:
            return f"{expected(details)}; not {value}", None


def _secrets_error(details: ErrorDetails) -> SpecError:
    """Convert an error in ``secrets`` without the input, which may be a secret."""
    field = ".".join(str(part) for part in details["loc"] if part != "[key]")
    remedy = "write HF_TOKEN: {env: HF_TOKEN} or HF_TOKEN: {file: ~/token}, for example"
    match details["type"]:
        case "extra_forbidden":
            message = "there is no such field"
        case _:
            message = expected(details)
    return SpecError(f"{field}: {message}", remedy=remedy, field=field)


def _rules_with(path: tuple[str | int, ...]) -> list[str]:
    """Return the rules that have the field at a path, below a rule that hasn't."""
    if len(path) < 2 or path[-2] not in RULES:
        return []
    return [str(name) for name, rule in RULES.items() if path[-1] in rule.model_fields]


def _fields_at(model: Any, path: tuple[str | int, ...]) -> Iterable[str]:
    """Return the fields of the section of a model at a path."""
    for part in path:
        if isinstance(part, int):  # An item of a list, whose annotation led to the item's model.
            continue
        annotation = RULES.get(part) or model.model_fields[part].annotation
        # An optional section is a union with None.
        model = next(
            (get_arg for get_arg in get_args(annotation) if get_arg is not type(None)), annotation
        )
    fields: dict[str, Any] = model.model_fields
    return [field.alias or name for name, field in fields.items()]
