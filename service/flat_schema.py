"""Nodes of a JSON Schema as plain assertions, and what can be done with them: both at once, neither, the values left.

A flat node is a dict of assertions alone: `type` is a set of types, `enum` a list (`const` an enum of one), `excluded`
a list of values that it is not, and `fractional` says that it is no integer. Sub-schemas stand with the JSON pointers
of their places: (schema, pointer).
Knows no references and no combinations of schemas: they have been taken apart before (`service.json_schema`).
"""

import json
import math
import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import product
from typing import Any

MAX_MULTIPLES = 1000

OF_TYPE = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
    "array": ("prefixItems", "items", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf"),
}
OF_TYPE["integer"] = OF_TYPE["number"]
TYPES = {*OF_TYPE, "boolean", "null"}
LOWER = ("minProperties", "minItems", "minLength", "minimum", "exclusiveMinimum")
UPPER = ("maxProperties", "maxItems", "maxLength", "maximum", "exclusiveMaximum")
COUNTS = ("minProperties", "minItems", "minLength", "maxProperties", "maxItems", "maxLength")
ASSERTIONS = {keyword for keywords in OF_TYPE.values() for keyword in keywords} | {"type", "enum"}
_NEGATED = {
    "minimum": "exclusiveMaximum", "exclusiveMinimum": "maximum", "maximum": "exclusiveMinimum",
    "exclusiveMaximum": "minimum", "minLength": "maxLength", "minItems": "maxItems", "minProperties": "maxProperties",
    "maxLength": "minLength", "maxItems": "minItems", "maxProperties": "minProperties",
}  # fmt: skip

Flat = dict[str, Any]


class SchemaError(Exception):
    """The schema is not served.

    Args:
        pointer: JSON pointer (RFC 6901) of the place.
        message: what is wrong there.
    """

    def __init__(self, pointer: str, message: str) -> None:
        super().__init__(f"{pointer or 'the schema'}: {message}")


def complement(flat: Flat, pointer: str) -> list[Flat]:  # noqa: PLR0912
    """What breaks one of the node's assertions."""
    broken: list[Flat] = []
    for keyword, value in flat.items():
        kind = next((kind for kind, words in OF_TYPE.items() if keyword in words), "")
        typed = {"type": frozenset({kind})}
        if keyword == "type":
            if "integer" in value and "number" not in value:
                broken.append({"type": frozenset({"number"}), "fractional": True})
            others = TYPES - value - ({"integer"} if "number" in value else {"number"} if "integer" in value else set())
            broken += [{"type": frozenset(others)}] if others else []
        elif keyword == "enum":
            broken.append({"excluded": value})
        elif keyword == "excluded":
            broken.append({"enum": value})
        elif keyword == "fractional":
            broken.append({"type": frozenset(TYPES - {"number"})})
        elif keyword == "required":
            broken += [{**typed, "properties": {name: (False, pointer)}} for name in value]
        elif keyword == "properties":
            for name, (schema, at) in value.items():
                if schema not in (True, {}):
                    broken.append({**typed, "required": [name], "properties": {name: ({"not": schema}, at)}})
        elif keyword in _NEGATED:
            step = 0 if keyword not in COUNTS else 1 if keyword.startswith("max") else -1
            if value + step >= 0 or not step:
                broken.append({**typed, _NEGATED[keyword]: value + step})
        elif keyword != "format" and not (keyword in ("additionalProperties", "items") and value[0] in (True, {})):
            raise SchemaError(pointer, f"the negation of {keyword} is not served")
    return broken


def excluding(types: set[str], excluded: list[Any], pointer: str) -> tuple[set[str], list[Any]]:
    """The types that are left without these values, and the values of those that have few."""
    left = types or TYPES - {"integer"}
    values: list[Any] = []
    for kind in [kind for kind in left if any(_is_of(value, (kind,)) for value in excluded)]:
        if kind not in ("boolean", "null"):
            raise SchemaError(pointer, f"all of type {kind} but some values are not served")
        left -= {kind}
        values += among([None] if kind == "null" else [False, True], excluded, inside=False)
    return left, values


def escaped(name: str) -> str:
    """The name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def located(flat: Flat, pointer: str) -> Flat:
    """Each sub-schema with its place: (schema, pointer)."""
    for keyword in ("properties", "patternProperties"):
        if keyword in flat:
            flat[keyword] = {
                name: (schema, f"{pointer}/{keyword}/{escaped(name)}") for name, schema in flat[keyword].items()
            }
    for keyword in ("additionalProperties", "items"):
        if keyword in flat:
            flat[keyword] = (flat[keyword], f"{pointer}/{keyword}")
    if "prefixItems" in flat:
        flat["prefixItems"] = [(entry, f"{pointer}/prefixItems/{n}") for n, entry in enumerate(flat["prefixItems"])]
    return flat


def kinds(flat: Flat) -> set[str]:
    """The types that a flat node speaks of; none where it says nothing."""
    if "enum" in flat:
        return {kind_of(value) for value in flat["enum"]}
    spoken = {kind for kind, words in OF_TYPE.items() if kind != "integer" and any(word in flat for word in words)}
    return set(flat.get("type") or spoken)


def merged(one: Flat, two: Flat, pointer: str, *, resolve: bool = True) -> Flat | None:
    """Both at once; None if it is plain that no value matches both.

    Raises: SchemaError where both at once cannot be expressed (without `resolve` the answer is about None only).
    """
    out: Flat = dict(one)
    for keyword, value in two.items():
        if keyword not in out or out[keyword] == value:
            out[keyword] = value
        elif keyword in _TOGETHER:
            out[keyword] = _TOGETHER[keyword](out[keyword], value)
        elif keyword == "items" and "prefixItems" not in one and "prefixItems" not in two:
            out["items"] = both(out["items"], value)
        elif keyword not in ("properties", "additionalProperties") and resolve and out.get("type", True):
            raise SchemaError(pointer, f"two different {keyword} at once are not served")
    if "fractional" in out and "type" in out:
        out["type"] -= {"integer"}
    if not out.get("type", True):
        return None
    if "enum" in out and "type" in out:
        out["enum"] = [value for value in out["enum"] if _is_of(value, out["type"])]
    if "enum" in out and "excluded" in out:
        out["enum"] = among(out["enum"], out.pop("excluded"), inside=False)
    if "enum" in out and not out["enum"]:
        return None
    plain = two if "prefixItems" in one else one  # which has none, if not both have
    if resolve and ("prefixItems" in one) != ("prefixItems" in two) and "items" in plain:
        raise SchemaError(pointer, "items and prefixItems of several schemas at once are not served")
    return _with_properties(out, one, two, pointer)


def _with_properties(out: Flat, one: Flat, two: Flat, pointer: str) -> Flat:
    """Properties of both; those of only one are further ones to the other."""
    limits = [flat.get("additionalProperties", (True, pointer)) for flat in (one, two)]
    if ("patternProperties" in one or "patternProperties" in two) and any(
        limit[0] not in (True, {}) for limit in limits
    ):
        if _object_words(one) and _object_words(two):
            raise SchemaError(pointer, "patternProperties of several schemas at once are not served")
        return out
    names = [flat.get("properties", {}) for flat in (one, two)]
    if names[0] or names[1]:
        properties = {}
        for name in dict.fromkeys([*names[0], *names[1]]):
            left, right = (own.get(name, limit) for own, limit in zip(names, limits, strict=True))
            properties[name] = both(left, right)
        out["properties"] = properties
    if "additionalProperties" in one and "additionalProperties" in two:
        out["additionalProperties"] = both(*limits)
    return out


def _object_words(flat: Flat) -> bool:
    return any(word in flat for word in ("properties", "patternProperties", "additionalProperties"))


def both(left: tuple[Any, str], right: tuple[Any, str]) -> tuple[Any, str]:
    """Two located schemas at once."""
    if left[0] is False or right[0] in (True, {}) or left == right:
        return left
    if right[0] is False or left[0] in (True, {}):
        return right
    return {"allOf": [left[0], right[0]]}, right[1]


def holds(value: Any, flat: Flat) -> bool:
    """Whether a value is what a flat node says, but for its parts."""
    if "enum" in flat and not among([value], flat["enum"]):
        return False
    if "type" in flat and not _is_of(value, flat["type"]):
        return False
    if among([value], flat.get("excluded", ())) or ("fractional" in flat and _is_of(value, ("integer",))):
        return False
    size = len(value) if isinstance(value, str | list | dict) else value
    judges: dict[str, Callable[[Any], bool]] = {
        **dict.fromkeys(("minimum", "minLength", "minItems", "minProperties"), lambda bound: size >= bound),
        **dict.fromkeys(("maximum", "maxLength", "maxItems", "maxProperties"), lambda bound: size <= bound),
        "exclusiveMinimum": lambda bound: size > bound,
        "exclusiveMaximum": lambda bound: size < bound,
        "multipleOf": lambda step: Fraction(str(value)) % Fraction(str(step)) == 0,
        "pattern": lambda pattern: re.search(pattern, value) is not None,
    }
    words = OF_TYPE.get(kind_of(value), ())
    return all(judge(flat[word]) for word, judge in judges.items() if word in words and word in flat)


def plain_numbers(value: Any) -> Any:
    """The value with whole numbers as they are commonly written: 1, not 1.0."""
    if isinstance(value, list):
        return [plain_numbers(part) for part in value]
    if isinstance(value, dict):
        return {name: plain_numbers(part) for name, part in value.items()}
    return int(value) if isinstance(value, float) and value == int(value) else value


def number_bounds(own: Flat, kind: str, pointer: str) -> dict[str, Any] | None:
    """The bounds of a number in one form; or an enum, where multipleOf leaves few. None: no number keeps to them."""
    low = max(own.get("minimum", -math.inf), own.get("exclusiveMinimum", -math.inf))
    high = min(own.get("maximum", math.inf), own.get("exclusiveMaximum", math.inf))
    open_low, open_high = own.get("exclusiveMinimum") == low, own.get("exclusiveMaximum") == high
    if low > high or (low == high and (open_low or open_high)):
        return None
    step = own.get("multipleOf", 1 if kind == "integer" else None)
    if step is None:
        made = {} if low == -math.inf else {"exclusiveMinimum" if open_low else "minimum": low}
        return made if high == math.inf else made | {"exclusiveMaximum" if open_high else "maximum": high}
    if step == 1:
        whole: dict[str, Any] = {"type": "integer"}
        if low != -math.inf:
            whole["minimum"] = math.floor(low) + 1 if open_low else math.ceil(low)
        if high != math.inf:
            whole["maximum"] = math.ceil(high) - 1 if open_high else math.floor(high)
        for keyword, bound in whole.items():
            if keyword != "type" and not -(1 << 63) <= bound < 1 << 63:
                raise SchemaError(
                    pointer, f"as {keyword} of an integer {bound} is not served: it has more than 64 bits"
                )
        return whole if whole.get("minimum", -math.inf) <= whole.get("maximum", math.inf) else None
    if not (math.isfinite(low) and math.isfinite(high) and (high - low) / step <= MAX_MULTIPLES):
        raise SchemaError(f"{pointer}/multipleOf", f"only served where bounds leave at most {MAX_MULTIPLES} values")
    if step != int(step):
        raise SchemaError(f"{pointer}/multipleOf", "only served for whole numbers")
    numbers = range(math.ceil(low / step) * int(step), math.floor(high) + 1, int(step))
    chosen = [n for n in numbers if own.get("exclusiveMinimum", n - 1) < n < own.get("exclusiveMaximum", n + 1)]
    return {"enum": chosen} if chosen else None


def kind_of(value: Any) -> str:
    """The JSON type of a value (integers are numbers)."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    names: dict[type, str] = {dict: "object", list: "array", str: "string"}
    return names.get(type(value), "null")


def _is_of(value: Any, types: Iterable[str]) -> bool:
    whole = kind_of(value) == "number" and value == int(value)
    return kind_of(value) in types or (whole and "integer" in types)


def among(values: Iterable[Any], others: Iterable[Any], *, inside: bool = True) -> list[Any]:
    """Those of the values that are among the others, or are not. By JSON's equality: 1 is 1.0 but not true."""

    def canonical(value: Any) -> str:
        return json.dumps(plain_numbers(value), sort_keys=True)

    known = set(map(canonical, others))
    return [value for value in values if (canonical(value) in known) is inside]


def _types(one: Iterable[str], two: Iterable[str]) -> frozenset[str]:
    """The types of both: an integer is a number too."""
    pairs = product(one, two)
    return frozenset(a if a == b else "integer" for a, b in pairs if a == b or {a, b} == {"integer", "number"})


# What two values of a keyword say together.
_TOGETHER: dict[str, Callable[[Any, Any], Any]] = {
    "type": _types,
    "enum": among,
    "required": lambda one, two: list(dict.fromkeys([*one, *two])),
    "excluded": lambda one, two: [*one, *two],
    "format": lambda one, _: one,
    **dict.fromkeys(LOWER, max),
    **dict.fromkeys(UPPER, min),
}
