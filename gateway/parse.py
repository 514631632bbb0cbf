"""From a body to checked fields; of what is wrong the first is told, by the caller's name of it. Knows no field."""

from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from gateway.errors import ApiError, invalid
from gateway.schemas import Body, TokenizeChatRequest, TokenizeTextRequest

B = TypeVar("B", bound=Body)


def parse_json(data: bytes) -> dict[str, Any]:
    """A JSON object out of a request body. Raises: ApiError 400 for anything else (NaN and lone surrogates too)."""
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    return value


def parse(kind: type[B], fields: dict[str, Any]) -> B:
    """Validates the fields of a request, of which null is none. Raises: ApiError 400 that names the first at fault."""
    known = {name: value for name, value in fields.items() if value is not None and name not in kind.ignored}
    for name in known.keys() & kind.unserved.keys():
        if not any(type(known[name]) is type(idle) and known[name] == idle for idle in kind.unserved[name]):
            raise ApiError(400, f"'{name}' is not supported yet.", param=name, code="unsupported_parameter")
        del known[name]
    # Before pydantic gathers every one of them.
    if unknown := next((name for name in known if name not in kind.model_fields), None):
        raise unknown_field(unknown[:200])
    try:
        return kind.model_validate(known)
    except ValidationError as error:
        raise first_fault(error) from error


def parse_tokenize(fields: dict[str, Any]) -> TokenizeChatRequest | TokenizeTextRequest:
    """Validates the fields of POST /tokenize, whose kind shows in them. Raises: ApiError 400."""
    text = fields.get("messages") is None
    return parse(TokenizeTextRequest, fields) if text else parse(TokenizeChatRequest, fields)


def unknown_field(param: str) -> ApiError:
    """The answer to a field that is neither served nor ignored."""
    return ApiError(400, f"Unknown field '{param}'.", param=param, code="unknown_parameter")


def first_fault(error: ValidationError) -> ApiError:
    """The first validation error, in a sentence that names the field as the caller wrote it."""
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ""
    for key in fault["loc"]:
        if isinstance(key, int):
            param += f"[{key}]"
        elif not key.endswith("]"):  # pydantic's names of union branches are no fields
            param += f".{key}" if param else key
    param = param[:200]
    if fault["type"] == "extra_forbidden":
        return unknown_field(param)
    if fault["type"] == "missing":
        return ApiError(400, f"'{param}' is required.", param=param, code="missing_required_parameter")
    return invalid(param, fault["msg"].removeprefix("Value error, "))
