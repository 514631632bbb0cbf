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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise, product
from typing import Any, Literal, TypeAlias
from urllib.parse import unquote

from service.flat_schema import (
    ASSERTIONS,
    COUNTS,
    LOWER,
    OF_TYPE,
    TYPES,
    UPPER,
    Flat,
    SchemaError,
    among,
    both,
    complement,
    escaped,
    excluding,
    holds,
    kinds,
    located,
    merged,
    number_bounds,
    plain_numbers,
)
from service.patterns import MAX_COUNT, PatternError, anchored, bounded, others

MAX_DEPTH = 64
MAX_NODES = 20_000
MAX_ALTERNATIVES = 128

# Assertions that cannot be expressed, and the values with which they assert nothing.
REFUSED: dict[str, tuple[Any, ...]] = dict.fromkeys(
    (
        "contains", "minContains", "maxContains", "divisibleBy", "$dynamicRef", "$recursiveRef", "disallow", "extends",
    ),
    (),
) | {"uniqueItems": (False,), "unevaluatedProperties": (True, {}), "unevaluatedItems": (True, {})}  # fmt: skip

# What the values of assertions must be; none is a boolean.
_FORMS: dict[str, tuple[Any, str]] = {
    "enum": (list, "a list"),
    "required": (list, "a list of strings"),
    "prefixItems": (list, "a list"),
    "properties": (dict, "an object"),
    "patternProperties": (dict, "an object"),
    "pattern": (str, "a string"),
    "format": (str, "a string"),
    **dict.fromkeys((*LOWER, *UPPER, "multipleOf"), (int | float, "a number")),
}

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


Node: TypeAlias = dict[str, Any] | Literal[False]


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
        self._why = SchemaError("", "")  # the latest reason why a node accepts no value

    def rewritten(self) -> Any:
        schema = self._node(self._root, "", 0)
        done: dict[str, Any] = {}
        while todo := [pointer for pointer, name in self._names.items() if name not in done]:
            for pointer in todo:
                done[self._names[pointer]] = self._node(self._target(pointer, pointer), pointer, 0)
        if schema is False or False in done.values():
            raise self._why
        try:
            direct = {name: [node["$ref"].rpartition("/")[2]] for name, node in done.items() if "$ref" in node}
            TopologicalSorter(direct).prepare()
        except CycleError as error:  # a grammar of it would never end
            pointer = next(pointer for pointer, name in self._names.items() if name in error.args[1])
            raise SchemaError(pointer, "the $ref leads back to itself") from error
        return {**schema, "$defs": done} if done else schema

    def _node(self, schema: Any, pointer: str, depth: int) -> Node:
        """A node of the core language; False: it accepts no value."""
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

    def _placed(self, placed: tuple[Any, str], depth: int) -> Node:
        return self._node(*placed, depth + 1)

    def _nothing(self, pointer: str, why: str = "it accepts no value") -> Literal[False]:
        self._why = SchemaError(pointer, why)
        return False

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
                lacks = {"properties": {name: (False, at)}}
                yield [lacks, *self._product([[{"required": [name]}], with_it], at)]
        if (own := schema.get("propertyNames", True)) is not True:
            at = f"{pointer}/propertyNames"
            plain = isinstance(own, dict) and own.keys() <= {"pattern", "type"} and isinstance(own.get("pattern"), str)
            if not plain:
                raise SchemaError(at, "propertyNames is only served with a pattern")
            if shared := [word for word in ("properties", "patternProperties") if schema.get(word)]:
                raise SchemaError(at, f"propertyNames is not served beside {shared[0]}")
            rest = {"patternProperties": {own["pattern"]: schema.get("additionalProperties", True)}}
            yield [located({**rest, "additionalProperties": False}, pointer)]

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

    def _flat(self, schema: dict[str, Any], pointer: str) -> Flat:
        """The node's own assertions, each checked for its form."""
        flat = _latest(schema)
        for keyword, value in flat.items():
            kind, form = _FORMS.get(keyword, (object, ""))
            if not isinstance(value, kind) or (form and isinstance(value, bool)):
                raise SchemaError(f"{pointer}/{keyword}", f"must be {form}")
            if keyword in COUNTS:
                if value < 0 or value != int(value):
                    raise SchemaError(f"{pointer}/{keyword}", "must be a whole number, at least 0")
                if keyword.startswith("min") and value > MAX_COUNT:
                    raise SchemaError(f"{pointer}/{keyword}", f"above {MAX_COUNT} it is not served")
                flat[keyword] = min(int(value), MAX_COUNT)  # no answer is longer
        if flat.get("multipleOf", 1) <= 0:
            raise SchemaError(f"{pointer}/multipleOf", "must be a number above 0")
        if not all(isinstance(name, str) for name in flat.get("required", ())):
            raise SchemaError(f"{pointer}/required", "must be a list of strings")
        if "type" in flat:
            types = flat["type"] if isinstance(flat["type"], list) else [flat["type"]]
            if not types or not all(isinstance(one, str) and one in TYPES for one in types):
                raise SchemaError(f"{pointer}/type", f"must be of {', '.join(sorted(TYPES))}")
            flat["type"] = frozenset(types)
        if "const" in schema:
            flat["enum"] = among(flat.get("enum", [schema["const"]]), [schema["const"]])
        # The paths of sub-schemas are needed when they are rewritten, which may be in another place.
        return located(flat, pointer)

    # From flat nodes to the core language.

    def _any_of(self, flats: list[Flat], pointer: str, depth: int) -> Node:
        nodes: list[dict[str, Any]] = []
        for flat in flats:
            nodes += [node for node in self._nodes_of(flat, pointer, depth) if node not in nodes]
        if not nodes:
            return self._nothing(pointer) if len(flats) != 1 else False
        return nodes[0] if len(nodes) == 1 else {"anyOf": nodes}

    def _nodes_of(self, flat: Flat, pointer: str, depth: int) -> list[dict[str, Any]]:
        """One node for each type that has values."""
        if "enum" in flat:
            rest = {keyword: value for keyword, value in flat.items() if keyword != "enum"}
            values = [value for value in flat["enum"] if self._fits(value, rest)] or self._nothing(f"{pointer}/enum")
            return [{"enum": plain_numbers(values)}] if values else []
        types = kinds(flat)
        nodes: list[dict[str, Any]] = []
        if "excluded" in flat:
            types, values = excluding(types, flat["excluded"], pointer)
            nodes = [{"enum": values}] if values else []
            if not types:
                self._nothing(pointer)
                return nodes
        if not types:
            return [{}]
        if "number" in types:
            if "fractional" in flat:
                raise SchemaError(pointer, "numbers that are no integers cannot be told apart")
            types -= {"integer"}
        for kind in sorted(types):
            made = self._typed(kind, flat, pointer, depth)
            if made is not False:
                nodes.append(made if "enum" in made else {"type": kind} | made)
        return nodes

    def _typed(self, kind: str, flat: Flat, pointer: str, depth: int) -> Node:
        """What a node says of values of one type."""
        own = {word: flat[word] for word in OF_TYPE.get(kind, ()) if word in flat}
        match kind:
            case "object":
                return self._object(own, pointer, depth)
            case "array":
                return self._array(own, pointer, depth)
            case "string":
                return self._string(own, pointer)
            case "integer" | "number":
                bounds = number_bounds(own, kind, pointer)
                return self._nothing(pointer) if bounds is None else bounds
        return {}

    def _fits(self, value: Any, flat: Flat) -> bool:
        """Whether a value of an enum keeps to the assertions beside it."""
        if not holds(value, flat):
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
        return all(any(self._fits(part, one) for one in self._alternatives(*placed, ())) for part, placed in parts)

    def _object(self, own: Flat, pointer: str, depth: int) -> Node:
        own = _widened(own, pointer)
        further = self._placed(own.get("additionalProperties", (True, pointer)), depth)
        required = list(dict.fromkeys(own.get("required", ())))
        patterns = own.get("patternProperties", {})
        properties: dict[str, Any] = {}
        forbidden: list[str] = []
        for name, placed in own.get("properties", {}).items():
            node = self._placed(placed, depth)
            if node is not False:
                properties[name] = node
            elif name in required:
                return False
            else:
                forbidden.append(name)
        for name in required:
            if name not in properties:
                if patterns:
                    raise SchemaError(f"{pointer}/required", f"{name!r:.80} is not among the properties")
                if further is False:
                    return self._nothing(f"{pointer}/required", f"{name!r:.80} is required but not allowed")
                properties[name] = further
        made: dict[str, Any] = {"properties": properties} if properties else {}
        # XGrammar 0.2.9 takes a name that is not written in plain ASCII for a further one, too.
        odd = any(json.dumps(name) != f'"{name}"' for name in properties)
        if patterns or ((forbidden or odd) and further is not False):
            made["patternProperties"] = self._patterns(patterns, [*properties, *forbidden], further, pointer, depth)
            further = False
        if required:
            made["required"] = required
        made["additionalProperties"] = further or further is not False
        counts = _property_counts(own, made, pointer)
        return self._nothing(f"{pointer}/maxProperties") if counts is None else made | counts

    def _patterns(
        self, patterns: dict[str, Any], names: list[str], further: Node, pointer: str, depth: int
    ) -> dict[str, Any]:
        """patternProperties, of all names but the given; `further` is a pattern too here, of all that others leave.

        Of several patterns none may match a name that another does, which shows where they begin differently.
        """
        at = f"{pointer}/patternProperties"
        if any(re.search(pattern, name) for pattern in patterns for name in names):
            raise SchemaError(at, "a property's name matches the pattern")
        if len(patterns) > 1:
            prefixes = sorted(_prefix(pattern, at) for pattern in patterns)
            if any(after.startswith(before) for before, after in pairwise(prefixes)):
                raise SchemaError(at, "a name might match several of its patterns")
        with _at(at):
            nodes = {anchored(pattern): self._placed(placed, depth) for pattern, placed in patterns.items()}
            made = {pattern: node for pattern, node in nodes.items() if node is not False}
            if further is not False:
                made[f"^{others(names, [_prefix(pattern, at) for pattern in patterns])}$"] = further
        return made

    def _array(self, own: Flat, pointer: str, depth: int) -> Node:
        prefix = [self._placed(placed, depth) for placed in own.get("prefixItems", ())]
        low, high = own.get("minItems", 0), own.get("maxItems")
        items = self._placed(own.get("items", (True, pointer)), depth)
        if False in prefix:  # it ends there
            prefix, items = prefix[: prefix.index(False)], False
        made: dict[str, Any] = {"prefixItems": prefix} if prefix else {}
        if items is False:
            high = len(prefix) if high is None else min(high, len(prefix))
        made["items"] = items or (items is not False or not prefix)
        if high is not None:
            if high < low:
                return self._nothing(f"{pointer}/maxItems")
            made["maxItems"] = high
        if low:
            made["minItems"] = low
        return made

    def _string(self, own: Flat, pointer: str) -> Node:
        low, high = own.get("minLength", 0), own.get("maxLength")
        lengths = {"minLength": low} if low else {}
        if high is not None:
            if high < low:
                return self._nothing(f"{pointer}/maxLength")
            lengths["maxLength"] = high
        if "pattern" in own:
            with _at(f"{pointer}/pattern"):
                return {"pattern": bounded(own["pattern"], low, high) if lengths else anchored(own["pattern"])}
        if lengths or "format" not in own:
            return lengths
        return {"format": own["format"]}  # an annotation: it may give way to the others

    # Places and references.

    def _check(self, schema: dict[str, Any], pointer: str) -> None:
        """Refuses keywords by name."""
        for keyword, harmless in REFUSED.items():
            if keyword in schema and not among([schema[keyword]], harmless):
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
        for token in pointer.split("/")[1:]:
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


def _latest(schema: dict[str, Any]) -> Flat:
    """The node's own assertions, as the latest draft spells them."""
    flat = {key: value for key, value in schema.items() if key in ASSERTIONS}
    if isinstance(flat.get("items"), list):  # up to 2019-09
        flat["prefixItems"] = flat.pop("items")
        flat["items"] = schema.get("additionalItems", True)
    if isinstance(flat.get("required"), bool):  # draft 3, and a common slip since
        del flat["required"]
    for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(flat.get(keyword), bool):  # draft 4
            bound = keyword.removeprefix("exclusive").lower()
            if flat.pop(keyword) and bound in flat:
                flat[keyword] = flat.pop(bound)
    return flat


@contextmanager
def _at(pointer: str) -> Iterator[None]:
    """Says of a pattern that cannot be expressed where it is."""
    try:
        yield
    except PatternError as error:
        raise SchemaError(pointer, str(error)) from error


def _property_counts(own: Flat, made: dict[str, Any], pointer: str) -> dict[str, int] | None:
    """minProperties and maxProperties, where they say more than the rest does; None: no object has so many."""
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
            return None
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


def _prefix(pattern: str, at: str) -> str:
    """The text that all names begin with that a pattern of the form ^text matches, and no others."""
    match = re.fullmatch(r"\^((?:[\w-]|\\[-.$/])+)(?:\.\*\$?)?", pattern, re.ASCII)
    if match is None:
        raise SchemaError(at, "only patterns like ^text are served beside further properties or other patterns")
    return match[1].replace("\\", "")


def _has_ref(schema: Any) -> bool:
    if isinstance(schema, dict):
        return isinstance(schema.get("$ref"), str) or any(_has_ref(value) for value in schema.values())
    return isinstance(schema, list) and any(_has_ref(value) for value in schema)
