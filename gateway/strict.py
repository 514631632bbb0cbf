"""How JSON of requests is read: types are meant strictly, and a field that is not known is an error."""

from pydantic import BaseModel, ConfigDict, model_validator


class Strict(BaseModel):
    """JSON types are meant strictly ("1" is no number) and a field that is not known is an error."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def null_is_nothing(cls, value: object) -> object:
        """Drops fields that are not known and null: clients dump all of their own when they send an answer back.

        Of the unknown ones that are something, the first is left, to be told: pydantic would gather them all.
        """
        if not isinstance(value, dict) or value.keys() <= cls.model_fields.keys():
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((name for name, each in value.items() if each is not None and name not in known), None)
        return {name: each for name, each in value.items() if name in known or name == unknown}
