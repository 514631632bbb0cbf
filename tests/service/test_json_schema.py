"""JSON Schemas before they are compiled: what is refused, by name and place, and what the rest is rewritten to."""

import itertools
import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.flat_schema import SchemaError
from service.grammar_worker import Constraint, compiled
from service.json_schema import core_schema
from service.patterns import PatternError, anchored, bounded, others
from tests.service.schema_corpus import CORPORA, check, corpus, follows, is_valid, let_through, new_compiler


@pytest.fixture(scope="module")
def compiler():
    return new_compiler()


def core(schema):
    return json.loads(core_schema(json.dumps(schema)))


@pytest.mark.parametrize(
    ("schema", "pointer", "words"),
    [
        ({"type": "array", "uniqueItems": True}, "/uniqueItems", "uniqueItems is not served"),
        ({"properties": {"a/b": {"contains": {}}}}, "/properties/a~1b/contains", "contains is not served"),
        ({"$defs": {"x": {"contains": {}}}, "$ref": "#/$defs/x"}, "/$defs/x/contains", "contains"),
        ({"items": {"unevaluatedItems": False}}, "/items/unevaluatedItems", "unevaluatedItems"),
        ({"anyOf": [{}, {"unevaluatedProperties": False}]}, "/anyOf/1/unevaluatedProperties", "unevaluatedProperties"),
        ({"type": "integer", "multipleOf": 7}, "/multipleOf", "bounds"),
        ({"type": "object", "minProperties": 2}, "/minProperties", "above 1"),
        ({"not": {"pattern": "a"}}, "/not", "the negation of pattern"),
        ({"$dynamicRef": "#x"}, "/$dynamicRef", "$dynamicRef"),
        ({"propertyNames": {"maxLength": 3}}, "/propertyNames", "propertyNames"),
        ({"patternProperties": {"a": {}, "b": {}}}, "/patternProperties", "^text"),
        ({"items": {"$ref": "http://example.com/x"}}, "/items/$ref", "within the schema"),
        ({"$ref": "#/nowhere"}, "/$ref", "nothing at #/nowhere"),
        ({"$ref": "#"}, "", "back to itself"),
        (
            {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "$ref": "#/$defs/a"},
            "/$defs/a/anyOf/0/$ref",
            "itself",
        ),
        ({"allOf": [{"$ref": "#"}]}, "/allOf/0/$ref", "back to itself"),
        ({"type": "string", "pattern": "(?=a)b"}, "/pattern", "(?"),
        ({"type": "string", "pattern": 'a"b'}, "/pattern", "quotes"),
        ({"type": "string", "pattern": "a|b", "maxLength": 3}, "/pattern", "maxLength"),
        ({"patternProperties": {"[": {}}, "properties": {"a": {}}, "additionalProperties": False}, "", "not valid"),
        ({"pattern": "[", "enum": ["a"]}, "", "not valid"),
        ({"type": "string", "pattern": "^a{4294967297}$"}, "/pattern", "repeated more than"),
        ({"type": "string", "pattern": "^b[{](a{1, 2147483648})?$"}, "/pattern", "repeated more than"),
        (
            {"properties": {"a": {}, "b": {}}, "additionalProperties": False, "minProperties": (1 << 32) + 1},
            "/minProperties",
            "above 2147483647",
        ),
        ({"items": {"type": "string", "minLength": 1 << 31}}, "/items/minLength", "above 2147483647"),
        ({"type": "integer", "minimum": -(10**30)}, "", "minimum of an integer"),
        ({"type": "integer", "exclusiveMinimum": (1 << 63) - 1}, "", "more than 64 bits"),
        ({"type": "strnig"}, "/type", "must be of"),
        ({"enum": []}, "", "no value"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "", "no value"),
        ({"type": "integer", "not": {"const": 0}}, "", "all of type integer but some values"),
        ({"required": ["a"], "additionalProperties": False}, "/required", "not allowed"),
        (False, "", "no value"),
        ([], "", "a schema is"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_name_and_place(schema, pointer, words):
    with pytest.raises(SchemaError) as caught:
        core(schema)
    place, _, message = str(caught.value).partition(": ")
    assert place == (pointer or "the schema")
    assert words in message


NUMBERS = ["NaN", "-Infinity", "1e999", "9" * 400, "9" * 5000]  # which no double holds
BAD = ["", "{", "NaN", "[" * 100_000, '"\\ud800"', *(f'{{"const": [{number}]}}' for number in NUMBERS)]


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:20])
def test_what_is_no_schema_is_refused(text):
    with pytest.raises(SchemaError):
        core_schema(text)


def test_keywords_are_no_keywords_where_they_name_properties_or_stand_in_values():
    schema = {
        "type": "object",
        "properties": {"uniqueItems": {"type": "boolean"}, "contains": {"enum": [{"contains": 1}]}},
        "required": ["uniqueItems"],
        "default": {"not": {}},
    }
    assert list(core(schema)["properties"]) == ["uniqueItems", "contains"]


def test_deep_and_wide_schemas_come_to_an_end():
    deep = {}
    for _ in range(100):
        deep = {"items": deep}
    with pytest.raises(SchemaError, match="64 levels"):
        core(deep)
    for opened, closed in (('{"not":', "}"), ('{"if":', ', "then": {}}'), ('{"allOf":[', "]}")):
        with pytest.raises(SchemaError, match=r"more than 64 levels|not valid JSON"):
            core_schema(opened * 5000 + "true" + closed * 5000)
    branches = {"anyOf": [{"minimum": n} for n in range(20)]}
    with pytest.raises(SchemaError, match="128 combinations"):
        core({"type": "number", "allOf": [branches, {"anyOf": [{"maximum": n} for n in range(20)]}]})


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        # Beside one another: XGrammar would look at one of these alone.
        ({"type": "string", "enum": [1, "a"]}, ['"a"'], ["1"]),
        ({"type": "object", "properties": {"a": {"type": "integer"}},
          "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
         ['{"a":1}', '{"b":2}', '{"a":1,"b":2}'], ["{}", '{"a":"x"}', '{"a":"x","b":2}']),
        ({"allOf": [{"minimum": 2}, {"maximum": 4}], "type": "integer"}, ["2", "4"], ["1", "5"]),
        ({"$ref": "#/$defs/a", "maxItems": 1, "$defs": {"a": {"type": "array", "items": {"type": "null"}}}},
         ["[]", "[null]"], ["[null,null]", "[1]"]),
        # Up to draft 7 a $ref stands alone.
        ({"$schema": "http://json-schema.org/draft-07/schema#", "items": {"$ref": "#/definitions/a", "maxItems": 1},
          "definitions": {"a": {"type": "array"}}}, ["[[1,2]]"], ["[1]"]),
        ({"minimum": 2}, ["2", "2.5"], ["1", '"x"']),
        ({"required": ["a"]}, ['{"a":1}', '{"a":1,"b":2}'], ["{}", '{"b":1}']),
        ({"type": ["string", "null"], "maxLength": 1}, ["null", '"x"'], ['"xy"', "1"]),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"},
         ['{"a":1}', '{"b":1}', '{"a":1,"c":1}'], ["{}", '{"a":1,"b":1}', '{"b":1,"a":1}']),
        ({"oneOf": [{"type": "integer"}, {"minimum": 3, "type": "integer"}]}, ["2"], ["3"]),
        ({"not": {"type": ["object", "array", "string"]}}, ["1", "true", "null"], ["{}", "[]", '"a"']),
        ({"type": ["boolean", "string"], "not": {"const": True}, "maxLength": 2}, ["false", '"ab"'], ["true", '"abc"']),
        ({"patternProperties": {"^x-": False}}, ["{}", '{"a":1,"x":2}'], ['{"x-a":1}', '{"a":1,"x-":2}']),
        ({"patternProperties": {"^x-": False}, "properties": {"a": {}}, "additionalProperties": False},
         ["{}", '{"a":1}'], ['{"x-a":1}', '{"b":1}']),
        ({"not": {"required": ["a"]}, "type": "object"},
         ["{}", '{"b":1}', '{"ab":1}', '{"":1}'], ['{"a":1}', '{"b":1,"a":1}']),
        ({"if": {"properties": {"t": {"const": 1}}, "required": ["t"]}, "then": {"required": ["x"]}, "type": "object",
          "properties": {"t": {"enum": [1, 2]}, "x": {}}}, ['{"t":1,"x":0}', '{"t":2}', "{}"], ['{"t":1}']),
        ({"dependentRequired": {"a": ["b"]}, "properties": {"a": {}, "b": {}}, "additionalProperties": False},
         ["{}", '{"b":1}', '{"a":1,"b":1}'], ['{"a":1}']),
        ({"not": {"dependentRequired": {"a": ["b"]}}}, ['{"a":1}'], ["8", '"x"', "{}", '{"a":1,"b":1}']),
        ({"type": ["string", "object"], "dependentRequired": {"a": ["b"]}}, ['"x"', "{}", '{"a":1,"b":1}'],
         ['{"a":1}', "1"]),
        ({"type": "integer", "minimum": 0, "maximum": 20, "multipleOf": 5}, ["0", "5", "20"], ["3", "25"]),
        ({"type": "string", "pattern": "b"}, ['"abc"', '"b"'], ['"ac"']),
        ({"type": "string", "pattern": "^a|c$"}, ['"ab"', '"bc"'], ['"ba"']),
        ({"type": "string", "pattern": "^[a-c]+$", "minLength": 2, "maxLength": 3},
         ['"ab"', '"abc"'], ['"a"', '"abca"', '"xy"']),
        ({"patternProperties": {"^x-": {"type": "integer"}}, "properties": {"a": {"type": "null"}}},
         ['{"a":null,"x-y":1,"z":[]}', '{"xy":"s"}'], ['{"x-y":"s"}', '{"a":1}']),
        ({"patternProperties": {".*": {"type": "integer"}}, "properties": {"a": {"maximum": 3}}},
         ['{"a":3,"b":9}'], ['{"a":4}', '{"b":"s"}']),
        ({"type": "integer", "minimum": 1.5, "exclusiveMaximum": 4}, ["2", "3"], ["1", "4"]),
        ({"minimum": 1, "exclusiveMinimum": True, "$schema": "http://json-schema.org/draft-04/schema#"},
         ["1.5"], ["1"]),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
         ['{"a":{"a":{}}}'], ['{"a":1}', '{"b":{}}']),
        ({"minProperties": 2, "properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False},
         ['{"a":1,"c":1}'], ["{}", '{"b":1}', '{"b":1,"b":1}']),
        ({"minProperties": 2, "required": ["a"]}, ['{"a":1,"b":1}'], ['{"a":1}', '{"a":1,"a":1}']),
        ({"type": "array", "prefixItems": [{}, False]}, ["[]", "[1]"], ["[1,2]"]),
        ({"type": "string", "pattern": "^[^é].*ü😀$"},
         ['"aü😀"', '"日本ü😀"'], ['"éü😀"', '"aü"', '"\\ü😀"', '"a"ü😀"', '"a\nü😀"']),
        ({"properties": {"größe": {"type": "integer"}}},
         ['{"größe":1,"größer":"x","é":2}', '{"g":"x"}'], ['{"größe":"x"}', '{"größe":1,"größe":"x"}', '{"":1:2}']),
        ({"properties": {'a"b': {"type": "integer"}, "c\n": {"type": "null"}}},
         ['{"a\\"b":1,"c\\n":null,"d":2}', '{"a":"x"}'], ['{"a\\"b":"x"}', '{"c\\n":1}', '{"c\\u000a":1}']),
        ({"properties": {"ß": {"type": "integer"}}, "required": ["ß"], "additionalProperties": {"type": "null"}},
         ['{"ß":1,"a":null}'], ["{}", '{"ß":null}', '{"ß":1,"a":1}']),
        # XGrammar counts in 32 bits, and begins anew.
        ({"type": "object", "maxProperties": (1 << 32) + 1}, ["{}", '{"a":1,"b":2}'], ["[]"]),
        ({"type": "array", "maxItems": 1 << 40, "items": {"type": "string", "maxLength": 1 << 32}},
         ['["a","b"]'], ["1"]),
        ({"type": "string", "pattern": "^[{4294967297}]{1,2147483647}$"}, ['"4{"', '"}"'], ['""', '"a"']),
        ({"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1},
         ["-9223372036854775808", "5"], ["1.5"]),
        (True, ["1", "{}", '"a"'], ["", "x"]),
    ],
)  # fmt: skip
def test_a_grammar_follows_its_schema(compiler, schema, accepted, refused):
    """Each text is judged by the jsonschema library too."""
    grammar = compiler.compile_json_schema(core_schema(json.dumps(schema)), strict_mode=False)
    for text in accepted:
        assert follows(grammar, text), text
        assert is_valid(schema, json.loads(text))
    for text in refused:
        assert not follows(grammar, text), text


NUMBERS, NAMES, COUNTS = st.sampled_from([0, 1, 2, 3, -1, 1.5, 2.0]), st.sampled_from("abc"), st.integers(0, 3)
VALUES = st.recursive(
    NUMBERS | st.sampled_from([None, True, False, "", "a", "ab"]),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(NAMES, each, max_size=3),
    max_leaves=4,
)
TYPES = st.lists(
    st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null"]), min_size=1, max_size=3
)


def nodes(each):
    """Schemas with a type and some keywords of any, of which `each` are parts."""
    words = {
        "properties": st.dictionaries(NAMES, each, max_size=2),
        "required": st.lists(NAMES, max_size=2, unique=True),
        "items": each,
        "prefixItems": st.lists(each, min_size=1, max_size=2),
        "enum": st.lists(VALUES, min_size=1, max_size=3),
        "const": VALUES,
        "pattern": st.sampled_from(["^a", "b$", "^[ab]+$"]),
        "dependentRequired": st.just({"a": ["b"]}),
        **dict.fromkeys(("additionalProperties", "not", "if", "then", "else"), each),
        **dict.fromkeys(("anyOf", "oneOf", "allOf"), st.lists(each, min_size=1, max_size=3)),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), NUMBERS),
        **dict.fromkeys(("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength"), COUNTS),
    }
    pairs = st.one_of(*(st.tuples(st.just(word), value) for word, value in words.items()))
    return st.builds(lambda types, said: {"type": types} | dict(said), TYPES, st.lists(pairs, max_size=4))


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    schema=st.recursive(st.booleans() | st.just({}) | nodes(st.booleans()), nodes, max_leaves=5),
    values=st.lists(VALUES, min_size=40, max_size=40),
)
def test_whatever_is_served_means_what_it_meant(schema, values):
    """The jsonschema library is the judge of both."""
    try:
        rewritten = core(schema)
    except SchemaError:
        return
    for value in values:
        assert is_valid(rewritten, value) == is_valid(schema, value), (rewritten, value)


@pytest.mark.parametrize("name", CORPORA)
def test_a_tenth_of_the_corpora(compiler, data_file, name):
    rows = list(corpus(data_file(name).parent, name))
    outcomes = {
        key: check(compiler, schema, tests) for key, schema, tests in random.Random(5).sample(rows, len(rows) // 10)
    }
    assert {key: one.wrong for key, one in outcomes.items() if one.wrong} == {}
    assert sum(one.accepted + one.rejected for one in outcomes.values()) > 20


@pytest.mark.full
@pytest.mark.parametrize(("name", "least"), [(CORPORA[0], 0.85), (CORPORA[1], 0.5)])
def test_all_of_the_corpora(compiler, data_file, name, least):
    outcomes = {key: check(compiler, schema, tests) for key, schema, tests in corpus(data_file(name).parent, name)}
    assert {key: one.wrong for key, one in outcomes.items() if one.wrong} == {}
    assert sum(not one.refused for one in outcomes.values()) >= least * len(outcomes)


@pytest.mark.parametrize("name", CORPORA)
def test_what_a_tenth_of_the_grammars_let_through_is_valid(compiler, data_file, name):
    rows = list(corpus(data_file(name).parent, name))
    number, wrong = let_through(compiler, random.Random(7).sample(rows, len(rows) // 10), seed=7, times=4)
    assert not wrong
    assert number > 20


@pytest.mark.full
@pytest.mark.parametrize("name", CORPORA)
def test_what_all_grammars_let_through_is_valid(compiler, data_file, name):
    number, wrong = let_through(compiler, corpus(data_file(name).parent, name), seed=8, times=20)
    assert not wrong
    assert number > 1000


@pytest.mark.parametrize(
    "pattern",
    [
        *("a(x6+)?", "a(x6*|-)?", "(6*x)?a", "a(6+-*)?", "a(x-?)?x?", "(a|x)?6", "a(-x(-[0-9]{1,2})+)?", "(a?)?x{1,2}"),
        *("(a|a{1,2})", r"-?(\d|\d{1,2})", "(a|x|x(a|6)?)"),
    ],
)
def test_a_pattern_lets_through_just_what_it_matches(compiler, pattern):
    """Python's own regular expressions are the judge, of all texts of up to five of four characters."""
    text = json.dumps({"type": "string", "pattern": f"^{pattern}$"})
    grammar = compiled(compiler, Constraint("json_schema", text))
    for length in range(6):
        for chars in itertools.product("a-x6", repeat=length):
            word = "".join(chars)
            assert follows(grammar, f'"{word}"') == bool(re.fullmatch(pattern, word)), word


@pytest.mark.parametrize("pattern", [r"^[\\].*$", r"^\x22.*$", r"^[\n]$", "^[^]$", r"^].*$"])
def test_a_pattern_that_xgrammar_would_let_quotes_into_is_refused(compiler, pattern):
    named = {"patternProperties": {pattern: {}}, "additionalProperties": False}
    for schema in ({"type": "string", "pattern": pattern}, {"items": named}):
        with pytest.raises(SchemaError, match=r"the pattern .* is not served"):
            compiled(compiler, Constraint("json_schema", json.dumps(schema)))


def test_patterns_are_brought_to_match_the_whole():
    assert anchored("^a$") == "^(?:a)(?:)$"
    assert anchored("a") == "^(?:.*a.*)(?:)$"
    assert anchored("^(a)?(b)??[)]?$") == "^(?:(a){0,1}(b){0,1}?[)]?)(?:)$"
    assert anchored("^a|[|]b$") == "^(?:a.*|.*[|]b)(?:)$"
    assert bounded("^[a-z]*$", 2, None) == "^(?:[a-z]{2,})(?:)$"
    assert bounded(r"^\d{2,9}$", 0, 4) == r"^(?:\d{2,4})(?:)$"
    for bad in ("a^b", "(a", r"a\nb", '"'):
        with pytest.raises(PatternError):
            anchored(bad)


def test_other_names_are_all_but_the_given():
    pattern = re.compile(f"^{others(['a', 'ab', 'b.'], ['x-'])}$")
    known = ["a", "ab", "b.", "x-", "x-y"]
    for name in ["", "a", "ab", "abc", "b", "b.", "bx", "b.x", "x", "x-", "x-y", "xy", "é"]:
        assert (pattern.match(name) is None) == (name in known), name
