"""Structured output over HTTP: every spelling becomes one field of the contract; errors come back by its own name."""

import grpc
import pytest

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": 9007199254740993}}}
TEXT = '{"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": 9007199254740993}}}'
PATHS = ["/v1/chat/completions", "/v1/completions"]


def body_of(kit, path, fields):
    return (kit.CHAT if "chat" in path else {"prompt": "p"}) | fields


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, "json_schema",
         TEXT),
        ({"response_format": {"type": "json_schema", "json_schema":
          {"name": "n", "description": "d", "strict": False, "schema": SCHEMA}}}, "json_schema", TEXT),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": True}}}, "json_schema", "true"),
        ({"guided_json": SCHEMA}, "json_schema", TEXT),
        ({"guided_json": TEXT}, "json_schema", TEXT),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["yes", "no"]}, "choices", ["yes", "no"]),
        ({"guided_grammar": 'root ::= "é"'}, "grammar", 'root ::= "é"'),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", TEXT),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["yes"]}}, "choices", ["yes"]),
        ({"structured_outputs": {"grammar": "g"}}, "grammar", "g"),
        ({"structured_outputs": {"json_object": True}, "guided_json": None}, "json_object", True),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, "regex", "a"),
        ({"response_format": {"type": "text"}, "structured_outputs": {}}, None, None),
        ({"structured_outputs": {"json_object": False}}, None, None),
    ],
    ids=repr,
)  # fmt: skip
def test_every_spelling_is_one_field_of_the_contract(http, gateway, engine, kit, path, fields, kind, value):
    answer = http.post(gateway + path, json=body_of(kit, path, fields))
    assert answer.status_code == 200, answer.text
    request = engine.calls[0].request
    assert request.WhichOneof("constraint") == kind
    if kind == "choices":
        assert list(request.choices.choices) == value
    elif kind is not None:
        assert getattr(request, kind) == value


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": {}, "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs.json_object"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
         "response_format.json_schema.strict"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
        ({"response_format": "json_object"}, "response_format"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
        ({"guided_regex": 1}, "guided_regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_wrong_is_named(http, gateway, engine, kit, path, fields, param):
    answer = http.post(gateway + path, json=body_of(kit, path, fields))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert not engine.calls


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "json_schema",
         "response_format.json_schema.schema"),
        ({"guided_regex": "("}, "regex", "guided_regex"),
        ({"structured_outputs": {"choice": [""]}}, "choices", "structured_outputs.choice"),
    ],
)  # fmt: skip
def test_the_engines_refusal_names_the_callers_field(http, gateway, engine, kit, fields, kind, param):
    why = kit.refuses(grpc.StatusCode.INVALID_ARGUMENT, "/not: no", kit.reason("INVALID_GRAMMAR"), kit.violation(kind))
    engine.script = why
    answer = http.post(f"{gateway}/v1/chat/completions", json=kit.CHAT | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, "invalid_grammar")
    assert error["message"] == f"Invalid '{param}': /not: no"
