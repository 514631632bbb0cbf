"""JSON Schemas in the form that the grammar compiler obeys: rewritten where it would not, else refused by name.

XGrammar ignores what it does not know, and keywords beside others that it looks at first. So every schema is brought
into a small core language before: each node is `{}`, a local `$ref`, an `anyOf`, an `enum`, or one type with keywords
of that type alone. What cannot be expressed there exactly is an error. A rewritten schema never accepts more than the
given one; it accepts less in this only: a node without `type` that has keywords of one type is of that type.

Written for JSON Schema 2020-12 (https://json-schema.org/draft/2020-12), with what earlier drafts spell otherwise.
Knows neither grammars nor tokens.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise, product
from typing import Any
from urllib.parse import unquote

from service.flat_schema import (
    ASSERTIONS,
    COUNTS,
    LOWER,
    OF_TYPE,
    TYPES,
    UPPER,
    Flat,
    NothingFits,
    SchemaError,
    both,
    complement,
    equal,
    escaped,
    excluding,
    is_in,
    keeps_bounds,
    kinds,
    located,
    merged,
    number_bounds,
    plain_numbers,
    without,
)
from service.patterns import PatternError, anchored, bounded, others

MAX_DEPTH = 64
MAX_NODES = 20_000
MAX_ALTERNATIVES = 128

# Assertions that cannot be expressed, and the values with which they assert nothing.
REFUSED: dict[str, tuple[object, ...]] = dict.fromkeys(
    (
        "contains", "minContains", "maxContains", "divisibleBy", "$dynamicRef", "$recursiveRef", "disallow", "extends",
    ),
    (),
) | {"uniqueItems": (False,), "unevaluatedProperties": (True, {}), "unevaluatedItems": (True, {})}  # fmt: skip

_APPLICATORS = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "propertyNames")
_DEPENDENT = ("dependentRequired", "dependentSchemas", "dependencies")


def core_schema(text: str) -> str:
    """The schema (JSON text) in the core language.

    Raises:
        SchemaError: it is no JSON Schema, or one that cannot be expressed.
    """
    try:
        root = json.loads(text, parse_float=_double, parse_int=_whole, parse_constant=_double)
    except (ValueError, RecursionError) as error:
        raise SchemaError("", f"not valid JSON: {error}") from error
    if not isinstance(root, dict | bool):
        raise SchemaError("", "a schema is a JSON object, or true or false")
    try:
        return json.dumps(_Rewriter(root).rewritten(), ensure_ascii=False)
    except RecursionError as error:
        raise SchemaError("", f"the schema has more than {MAX_DEPTH} levels") from error
    except re.error as error:
        raise SchemaError("", f"the pattern {error.pattern!r:.80} is not valid: {error}") from error


def _double(text: str) -> float:
    """NaN and the infinities are no JSON, and greater numbers none that the compiler of grammars takes."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text:.20} is not in the range of numbers")
    return value


def _whole(text: str) -> int:
    _double(text)
    return int(text)


class _Rewriter:
    """Works on one schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        dialect = root.get("$schema") if isinstance(root, dict) else None
        # Up to draft 7 a $ref stands alone: what is beside it does not count.
        self._lone_refs = isinstance(dialect, str) and re.search(r"draft-0[34567]", dialect) is not None
        self._id = "id" if isinstance(dialect, str) and re.search(r"draft-0[34]", dialect) else "$id"
        self._names: dict[str, str] = {}  # of definitions, by the pointer of what they define
        self._nodes = 0

    def rewritten(self) -> Any:
        schema = self._node(self._root, "", 0)
        done: dict[str, Any] = {}
        while todo := [pointer for pointer, name in self._names.items() if name not in done]:
            for pointer in todo:
                done[self._names[pointer]] = self._node(self._target(pointer, pointer), pointer, 0)
        for pointer, name in self._names.items():
            if _reaches_itself(name, done):
                raise SchemaError(pointer, "the $ref leads back to itself")
        return {**schema, "$defs": done} if done else schema

    def _node(self, schema: Any, pointer: str, depth: int) -> dict[str, Any]:
        """A node of the core language."""
        self._nodes += 1
        if depth > MAX_DEPTH or self._nodes > MAX_NODES:
            limit = f"{MAX_DEPTH} levels" if depth > MAX_DEPTH else f"{MAX_NODES} nodes"
            raise SchemaError(pointer, f"the schema has more than {limit}")
        if not (isinstance(schema, dict) and schema.get("$ref") and self._stands_alone(schema)):
            return self._any_of(self._alternatives(schema, pointer, ()), pointer, depth)
        self._check(schema, pointer)
        target = self._pointer(schema["$ref"], f"{pointer}/$ref")
        self._target(target, f"{pointer}/$ref")
        return {"$ref": f"#/$defs/{self._names.setdefault(target, f'd{len(self._names)}')}"}

    def _placed(self, placed: tuple[Any, str], depth: int) -> dict[str, Any]:
        return self._node(*placed, depth + 1)

    def _stands_alone(self, schema: dict[str, Any]) -> bool:
        further = ("const", *_APPLICATORS, *_DEPENDENT)
        return self._lone_refs or not any(key in schema for key in (*ASSERTIONS, *further))

    # What a node says, as alternatives of flat nodes.

    def _alternatives(self, schema: Any, pointer: str, seen: tuple[str, ...]) -> list[Flat]:
        if isinstance(schema, bool):
            return [{}] if schema else []
        if not isinstance(schema, dict):
            raise SchemaError(pointer, "a schema is a JSON object, or true or false")
        self._check(schema, pointer)
        parts: list[list[Flat]] = []
        if "$ref" in schema:
            target = self._pointer(schema["$ref"], f"{pointer}/$ref")
            if target in seen:
                raise SchemaError(f"{pointer}/$ref", "the $ref leads back to itself")
            found = self._target(target, f"{pointer}/$ref")
            parts.append(self._alternatives(found, target, (*seen, target)))
        if "$ref" not in schema or not self._lone_refs:
            parts.append([self._flat(schema, pointer)])
            for keyword in ("allOf", "anyOf", "oneOf"):
                branches = schema.get(keyword, ())
                if keyword in schema and not (isinstance(branches, list) and branches):
                    raise SchemaError(f"{pointer}/{keyword}", "must be a list of at least one schema")
                each = [
                    self._alternatives(branch, f"{pointer}/{keyword}/{number}", seen)
                    for number, branch in enumerate(branches)
                ]
                if keyword == "allOf":
                    parts += each
                elif each and keyword == "anyOf":
                    parts.append([flat for one in each for flat in one])
                elif each:
                    parts.append(self._one_of(self._product(parts, pointer), each, f"{pointer}/oneOf"))
            parts += self._conditions(schema, pointer, seen)
        return self._product(parts, pointer)

    def _conditions(self, schema: dict[str, Any], pointer: str, seen: tuple[str, ...]) -> Iterator[list[Flat]]:
        """What `not`, `if` and dependencies say."""
        if "not" in schema:
            yield self._negated(schema["not"], f"{pointer}/not", seen)
        if "if" in schema and ("then" in schema or "else" in schema):
            given = self._alternatives(schema["if"], f"{pointer}/if", seen)
            then, other = (
                self._alternatives(schema.get(word, True), f"{pointer}/{word}", seen) for word in ("then", "else")
            )
            unless = self._negated(schema["if"], f"{pointer}/if", seen)
            yield self._product([given, then], pointer) + self._product([unless, other], pointer)
        for keyword in _DEPENDENT:
            if not isinstance(dependent := schema.get(keyword, {}), dict):
                raise SchemaError(f"{pointer}/{keyword}", "must be an object")
            for name, needed in dependent.items():
                at = f"{pointer}/{keyword}/{escaped(name)}"
                needs = {"required": [needed] if isinstance(needed, str) else needed}
                with_it = self._alternatives(needed if isinstance(needed, dict | bool) else needs, at, seen)
                has = {"type": frozenset({"object"}), "required": [name]}
                yield [without(name, at), *self._product([[has], with_it], at)]
        if "propertyNames" in schema:
            at, own = f"{pointer}/propertyNames", schema["propertyNames"]
            plain = isinstance(own, dict) and own.keys() <= {"pattern", "type"} and isinstance(own.get("pattern"), str)
            if own is not True and not plain:
                raise SchemaError(at, "propertyNames is only served with a pattern")
            if own is not True:
                shared = {word: schema[word] for word in ("properties", "patternProperties") if schema.get(word)}
                if shared:
                    raise SchemaError(at, f"propertyNames is not served beside {next(iter(shared))}")
                rest = {"patternProperties": {own["pattern"]: schema.get("additionalProperties", True)}}
                yield [located({"type": frozenset({"object"}), **rest, "additionalProperties": False}, pointer)]

    def _one_of(self, common: list[Flat], each: list[list[Flat]], at: str) -> list[Flat]:
        """Those of one branch that match no other; where it is plain that none does, the branches as they are."""
        chosen: list[Flat] = []
        for number, branch in enumerate(each):
            mine = self._product([common, branch], at)
            for other in (*each[:number], *each[number + 1 :]):
                theirs = self._product([common, other], at)
                if not all(self._apart(one, two) for one in mine for two in theirs):
                    mine = self._product([mine, self._complement(other, at)], at)
            chosen += mine
        return chosen

    def _negated(self, schema: Any, pointer: str, seen: tuple[str, ...]) -> list[Flat]:
        if isinstance(schema, dict) and schema.keys() - {"$comment", "description", "title"} == {"not"}:
            return self._alternatives(schema["not"], f"{pointer}/not", seen)
        return self._complement(self._alternatives(schema, pointer, seen), pointer)

    def _complement(self, flats: list[Flat], pointer: str) -> list[Flat]:
        """What matches none of them. Raises: SchemaError where that cannot be expressed."""
        return self._product([complement(flat, pointer) for flat in flats], pointer)

    def _product(self, parts: Iterable[list[Flat]], pointer: str) -> list[Flat]:
        found: list[Flat] = [{}]
        for part in parts:
            pairs = [merged(one, other, pointer) for one in found for other in part]
            found = [flat for flat in pairs if flat is not None]
            if len(found) > MAX_ALTERNATIVES:
                raise SchemaError(
                    pointer, f"it has more than {MAX_ALTERNATIVES} combinations of anyOf, oneOf and allOf"
                )
        return found

    def _flat(self, schema: dict[str, Any], pointer: str) -> Flat:  # noqa: PLR0912
        """The node's own assertions, each checked for its form."""
        flat: Flat = {key: value for key, value in schema.items() if key in ASSERTIONS}
        if "type" in schema:
            types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            if not types or not all(isinstance(one, str) and one in TYPES for one in types):
                raise SchemaError(f"{pointer}/type", f"must be of {', '.join(sorted(TYPES))}")
            flat["type"] = frozenset(types)
        if "enum" in schema and not isinstance(schema["enum"], list):
            raise SchemaError(f"{pointer}/enum", "must be a list")
        step = flat.get("multipleOf", 1)
        if isinstance(step, bool) or not isinstance(step, int | float) or step <= 0:
            raise SchemaError(f"{pointer}/multipleOf", "must be a number above 0")
        if "const" in schema:
            flat["enum"] = [one for one in flat.get("enum", [schema["const"]]) if equal(one, schema["const"])]
        for keyword in (*LOWER, *UPPER):
            value = schema.get(keyword, 0)
            if isinstance(value, bool) and keyword.startswith("exclusive"):  # as draft 4 spells it
                bound = keyword.removeprefix("exclusive").lower()
                del flat[keyword]
                if value and bound in flat:
                    flat[keyword] = flat.pop(bound)
            elif isinstance(value, bool) or not isinstance(value, int | float):
                raise SchemaError(f"{pointer}/{keyword}", "must be a number")
            elif keyword in COUNTS and keyword in flat:
                if value < 0 or value != int(value):
                    raise SchemaError(f"{pointer}/{keyword}", "must be a whole number, at least 0")
                flat[keyword] = int(value)
        for keyword, kind in (("properties", dict), ("patternProperties", dict), ("pattern", str), ("format", str)):
            if not isinstance(schema.get(keyword, kind()), kind):
                raise SchemaError(f"{pointer}/{keyword}", f"must be {'an object' if kind is dict else 'a string'}")
        required = schema.get("required", [])
        if isinstance(required, bool):  # draft 3, and a common slip since
            del flat["required"]
        elif not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise SchemaError(f"{pointer}/required", "must be a list of strings")
        if isinstance(schema.get("items"), list):  # as prefixItems was spelt up to 2019-09
            flat["prefixItems"] = flat.pop("items")
            flat["items"] = schema.get("additionalItems", True)
        if not isinstance(flat.get("prefixItems", []), list):
            raise SchemaError(f"{pointer}/prefixItems", "must be a list")
        # The paths of sub-schemas are needed when they are rewritten, which may be in another place.
        return located(flat, pointer)

    # From flat nodes to the core language.

    def _any_of(self, flats: list[Flat], pointer: str, depth: int) -> dict[str, Any]:
        nodes: list[dict[str, Any]] = []
        for flat in flats:
            try:
                nodes += [node for node in self._nodes_of(flat, pointer, depth) if node not in nodes]
            except NothingFits:
                if len(flats) == 1:
                    raise
        if not nodes:
            raise NothingFits(pointer, "it accepts no value")
        return nodes[0] if len(nodes) == 1 else {"anyOf": nodes}

    def _nodes_of(self, flat: Flat, pointer: str, depth: int) -> list[dict[str, Any]]:
        """One node for each type."""
        if "enum" in flat:
            values = [value for value in flat["enum"] if self._fits(value, flat)]
            if not values:
                raise NothingFits(f"{pointer}/enum", "it accepts no value")
            return [{"enum": plain_numbers(values)}]
        types = flat.get("type") or {
            kind for kind, keywords in OF_TYPE.items() if kind != "integer" and any(word in flat for word in keywords)
        }
        if "excluded" in flat:
            types, excluded = excluding(types, flat["excluded"], pointer)
            if excluded:
                return [{"enum": excluded}, *(self._nodes_of({"type": types}, pointer, depth) if types else ())]
        if not types:
            return [{}]
        if "number" in types:
            if "fractional" in flat:
                raise SchemaError(pointer, "numbers that are no integers cannot be told apart")
            types = types - {"integer"}
        makers: dict[str, Callable[[Flat, str, int], dict[str, Any]]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
        }
        nodes = []
        for kind in sorted(types):
            own = {word: flat[word] for word in OF_TYPE.get(kind, ()) if word in flat}
            try:
                made = makers[kind](own, pointer, depth) if kind in makers else number_bounds(own, kind, pointer)
            except NothingFits:
                if len(types) == 1:
                    raise
                continue
            nodes.append(made if "enum" in made else {"type": kind} | made)
        return nodes

    def _fits(self, value: Any, flat: Flat) -> bool:
        """Whether a value of an enum keeps to the assertions beside it."""
        if not keeps_bounds(value, flat):
            return False
        parts: list[tuple[Any, tuple[Any, str]]] = []
        if isinstance(value, dict):
            if any(name not in value for name in flat.get("required", ())):
                return False
            for name, part in value.items():
                own = [flat["properties"][name]] if name in flat.get("properties", {}) else []
                own += [one for pattern, one in flat.get("patternProperties", {}).items() if re.search(pattern, name)]
                parts += [(part, one) for one in own or [flat.get("additionalProperties", (True, ""))]]
        elif isinstance(value, list):
            prefix, further = flat.get("prefixItems", []), flat.get("items", (True, ""))
            parts += [(part, prefix[n] if n < len(prefix) else further) for n, part in enumerate(value)]
        return all(
            any(self._fits(part, one) and is_in(part, one) for one in self._alternatives(*placed, ()))
            for part, placed in parts
        )

    def _object(self, own: Flat, pointer: str, depth: int) -> dict[str, Any]:
        own = _widened(own, pointer)
        further = self._further(own, pointer, depth)
        required = list(dict.fromkeys(own.get("required", ())))
        patterns = own.get("patternProperties", {})
        properties: dict[str, Any] = {}
        forbidden: list[str] = []
        for name, (schema, at) in own.get("properties", {}).items():
            try:
                properties[name] = self._node(schema, at, depth + 1)
            except NothingFits:
                if name in required:
                    raise
                forbidden.append(name)
        for name in required:
            if name not in properties:
                if patterns:
                    raise SchemaError(f"{pointer}/required", f"{name!r:.80} is not among the properties")
                if further is None:
                    raise NothingFits(f"{pointer}/required", f"{name!r:.80} is required but not allowed")
                properties[name] = further
        made: dict[str, Any] = {"properties": properties} if properties else {}
        if patterns or (forbidden and further is not None):
            made["patternProperties"] = self._named(patterns, [*properties, *forbidden], further, pointer, depth)
            further = None
        if required:
            made["required"] = required
        made["additionalProperties"] = False if further is None else further or True
        return made | _property_counts(own, made, pointer)

    def _further(self, own: Flat, pointer: str, depth: int) -> dict[str, Any] | None:
        """What properties are that no name or pattern is given for; None: there are none."""
        placed = own.get("additionalProperties", (True, pointer))
        try:
            return None if placed[0] is False else self._placed(placed, depth)
        except NothingFits:
            return None

    def _named(
        self, patterns: dict[str, Any], names: list[str], further: dict[str, Any] | None, pointer: str, depth: int
    ) -> dict[str, Any]:
        """patternProperties, of all names but the given; `further` is a pattern too here, of all that others leave."""
        at = f"{pointer}/patternProperties"
        if any(re.search(pattern, name) for pattern in patterns for name in names):
            raise SchemaError(at, "a property's name matches the pattern")
        made = self._patterns(patterns, pointer, depth)
        if further is not None:
            made[_others(names, [_prefix(pattern, pointer) for pattern in patterns], at)] = further
        return made

    def _patterns(self, patterns: dict[str, Any], pointer: str, depth: int) -> dict[str, Any]:
        """Of several patterns none may match a name that another does, which shows where they begin differently."""
        at = f"{pointer}/patternProperties"
        if len(patterns) > 1:
            prefixes = sorted(_prefix(pattern, pointer) for pattern in patterns)
            if any(after.startswith(before) for before, after in pairwise(prefixes)):
                raise SchemaError(at, "a name might match several of its patterns")
        return {
            _anchored(pattern, at): self._node(schema, place, depth + 1)
            for pattern, (schema, place) in patterns.items()
        }

    def _array(self, own: Flat, pointer: str, depth: int) -> dict[str, Any]:
        prefix = [self._placed(entry, depth) for entry in own.get("prefixItems", ())]
        low, high = own.get("minItems", 0), own.get("maxItems")
        made: dict[str, Any] = {"prefixItems": prefix} if prefix else {}
        items = own.get("items", (True, pointer))
        try:
            made["items"] = False if items[0] is False else self._placed(items, depth) or True
        except NothingFits:
            made["items"] = False
        if made["items"] is False:
            high = len(prefix) if high is None else min(high, len(prefix))
            if not prefix:
                made["items"] = True
        if high is not None:
            if high < low:
                raise NothingFits(f"{pointer}/maxItems", "it accepts no value")
            made["maxItems"] = high
        if low:
            made["minItems"] = low
        return made

    def _string(self, own: Flat, pointer: str, depth: int) -> dict[str, Any]:
        low, high = own.get("minLength", 0), own.get("maxLength")
        lengths = {"minLength": low} if low else {}
        if high is not None:
            if high < low:
                raise NothingFits(f"{pointer}/maxLength", "it accepts no value")
            lengths["maxLength"] = high
        if "pattern" in own:
            try:
                return {"pattern": bounded(own["pattern"], low, high) if lengths else anchored(own["pattern"])}
            except PatternError as error:
                raise SchemaError(f"{pointer}/pattern", str(error)) from error
        if lengths or "format" not in own:
            return lengths
        return {"format": own["format"]}  # an annotation: it may give way to the others

    # Places and references.

    def _check(self, schema: dict[str, Any], pointer: str) -> None:
        """Refuses keywords by name."""
        for keyword, harmless in REFUSED.items():
            if keyword in schema and not any(
                type(one) is type(schema[keyword]) and one == schema[keyword] for one in harmless
            ):
                raise SchemaError(f"{pointer}/{keyword}", f"{keyword} is not served")
        if pointer and isinstance(base := schema.get(self._id), str) and not base.startswith("#") and _has_ref(schema):
            raise SchemaError(f"{pointer}/{self._id}", "a $ref beneath another $id is not served")

    def _pointer(self, ref: Any, at: str) -> str:
        """The JSON pointer that a local reference holds."""
        if not isinstance(ref, str):
            raise SchemaError(at, "must be a string")
        own = self._root.get(self._id) if isinstance(self._root, dict) else None
        if isinstance(own, str) and ref.startswith(own.rstrip("#") + "#"):
            ref = ref[len(own.rstrip("#")) :]
        if ref != "#" and not ref.startswith("#/"):
            raise SchemaError(at, f"only references within the schema (#/...) are served, not {ref!r:.100}")
        return unquote(ref[1:])

    def _target(self, pointer: str, at: str) -> Any:
        """What is at a JSON pointer (RFC 6901)."""
        found = self._root
        for number, token in enumerate(pointer.split("/")):
            if number:
                name = token.replace("~1", "/").replace("~0", "~")
                if isinstance(found, dict) and name in found:
                    found = found[name]
                elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                    found = found[int(name)]
                else:
                    raise SchemaError(at, f"there is nothing at #{pointer:.100}")
        if not isinstance(found, dict | bool):
            raise SchemaError(at, f"there is no schema at #{pointer:.100}")
        return found

    def _apart(self, one: Flat, two: Flat, depth: int = 0) -> bool:
        """Whether it is plain that no value matches both."""
        if depth > 4:
            return False
        if merged(one, two, "", resolve=False) is None:
            return True
        if not (kinds(one) == kinds(two) == {"object"}):
            return False
        for left, right in ((one, two), (two, one)):
            closed = right.get("additionalProperties", (True,))[0] is False and "patternProperties" not in right
            if closed and any(name not in right.get("properties", {}) for name in left.get("required", ())):
                return True
        shared = set(one.get("required", ())) & set(two.get("required", ()))
        for name in shared & one.get("properties", {}).keys() & two.get("properties", {}).keys():
            (left, at), (right, place) = (flat["properties"][name] for flat in (one, two))
            pairs = product(self._alternatives(left, at, ()), self._alternatives(right, place, ()))
            if all(self._apart(a, b, depth + 1) for a, b in pairs):
                return True
        return False


def _property_counts(own: Flat, made: dict[str, Any], pointer: str) -> dict[str, int]:
    """minProperties and maxProperties, where they say more than the rest does."""
    counts = {}
    least, listed = len(made.get("required", ())), made["additionalProperties"] is False
    listed = listed and "patternProperties" not in made
    low, high = own.get("minProperties", 0), own.get("maxProperties")
    if low > least:
        if low > least + 1 and not listed:  # names that are not listed may come twice, which makes one property
            only = "above 1 (beside what is required) it is only served where additionalProperties is false"
            raise SchemaError(f"{pointer}/minProperties", only)
        counts["minProperties"] = low
    if high is not None:
        if high < max(low, least):
            raise NothingFits(f"{pointer}/maxProperties", "it accepts no value")
        if not listed or high < len(made.get("properties", ())):
            counts["maxProperties"] = high
    return counts


def _widened(own: Flat, pointer: str) -> Flat:
    """Where a pattern matches every name, it says what all properties are, and nothing is further."""
    wide = [pattern for pattern in own.get("patternProperties", {}) if re.fullmatch(r"\^?\(?\.[*+]\)?\$?|", pattern)]
    if not wide:
        return own
    rest = {word: value for word, value in own.items() if word not in ("patternProperties", "additionalProperties")}
    more = {pattern: schema for pattern, schema in own["patternProperties"].items() if pattern not in wide}
    if more or len(wide) > 1:
        raise SchemaError(f"{pointer}/patternProperties", "a name might match several of its patterns")
    schema = own["patternProperties"][wide[0]]
    properties = {name: both(placed, schema) for name, placed in own.get("properties", {}).items()}
    return rest | {"properties": properties, "additionalProperties": schema}


def _prefix(pattern: str, pointer: str) -> str:
    """The text that all names begin with that a pattern of the form ^text matches, and no others."""
    match = re.fullmatch(r"\^((?:[\w-]|\\[-.$/])+)(?:\.\*\$?)?", pattern, re.ASCII)
    if match is None:
        form = "only patterns like ^text are served beside further properties or other patterns"
        raise SchemaError(f"{pointer}/patternProperties", form)
    return match[1].replace("\\", "")


def _others(names: Iterable[str], prefixes: Iterable[str], at: str) -> str:
    """A pattern of the names that are none of these and begin with none of the prefixes."""
    try:
        return f"^{others(names, prefixes)}$"
    except PatternError as error:
        raise SchemaError(at, str(error)) from error


def _anchored(pattern: str, at: str) -> str:
    try:
        return anchored(pattern)
    except PatternError as error:
        raise SchemaError(at, str(error)) from error


def _has_ref(schema: Any) -> bool:
    if isinstance(schema, dict):
        return isinstance(schema.get("$ref"), str) or any(_has_ref(value) for value in schema.values())
    return isinstance(schema, list) and any(_has_ref(value) for value in schema)


def _reaches_itself(name: str, definitions: dict[str, Any]) -> bool:
    """Whether a definition leads to itself with nothing between: a grammar of it would never end."""
    todo, seen = [definitions[name]], set()
    while todo:
        node = todo.pop()
        todo += node.get("anyOf", ())
        if "$ref" in node:
            target = node["$ref"].removeprefix("#/$defs/")
            if target == name:
                return True
            if target not in seen:
                seen.add(target)
                todo.append(definitions[target])
    return False
