"""What an answer must follow, in OpenAI's field or in vLLM's, as one field of the contract. Compiles nothing."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from fulcrum import limits
from gateway.strict import Strict

Schema = dict[str, Any] | bool
# vLLM's names of the contract's fields.
VLLM = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choices",
    "grammar": "grammar",
    "json_object": "json_object",
}
Choices = Annotated[list[str], Field(min_length=1, max_length=limits.CHOICES, fail_fast=True)]


class JsonSchema(Strict):
    """OpenAI's `json_schema`: the schema and its name. It is obeyed, whatever `strict` says."""

    schema_: Annotated[Schema, Field(alias="schema")]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def schema_where_it_belongs(self) -> "ResponseFormat":
        """json_schema with the type of that name, and only there."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is needed with the type json_schema, and only there")
        return self

    @property
    def given(self) -> list["Given"]:
        """What it asks for, if anything."""
        if self.json_schema is not None:
            return [Given("response_format.json_schema.schema", "json_schema", _text(self.json_schema.schema_))]
        return [Given("response_format", "json_object", True)] if self.type == "json_object" else []


class TextFormat(Strict):
    """OpenAI's `text.format`: the same, flat."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def schema_where_it_belongs(self) -> "TextFormat":
        """A schema with json_schema, and only there."""
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema is needed with the type json_schema, and only there")
        return self

    @property
    def given(self) -> list["Given"]:
        """What it asks for, if anything."""
        if self.schema_ is not None:
            return [Given("text.format.schema", "json_schema", _text(self.schema_))]
        return [Given("text.format", "json_object", True)] if self.type == "json_object" else []


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`: one of these."""

    json_: Annotated[Schema | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Given(NamedTuple):
    """One constraint: where the caller wrote it, the contract's field, and its value there."""

    param: str
    field: str
    value: str | bool | list[str]


def in_vllms_fields(place: str, values: Mapping[str, Any]) -> list[Given]:
    """The constraints in vLLM's fields, by their names behind `place`."""
    return [
        Given(place + name, field, _text(value) if name == "json" else value)
        for name, field in VLLM.items()
        if (value := values.get(name)) is not None and (name, value) != ("json_object", False)
    ]


def _text(schema: Schema | str) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
