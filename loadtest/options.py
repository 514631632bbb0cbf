"""Kinds of command-line options that load tests share."""

import math
import os
from typing import Any, Generic, TypeVar

import click

_Value = TypeVar("_Value")


class Number(click.FloatRange):
    """A number: never NaN, and infinite only where that has a meaning."""

    def __init__(self, *, infinite: bool = False, **bounds: Any) -> None:
        super().__init__(**bounds)
        self._infinite = infinite

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Fails, naming the option, for what is no such number."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number) or (math.isinf(number) and not self._infinite):
            self.fail(f"{value!r} is not a {'' if self._infinite else 'finite '}number", param, ctx)
        return number


class Listed(click.ParamType[tuple[_Value, ...]], Generic[_Value]):
    """Values of one kind, between commas."""

    def __init__(self, kind: click.ParamType[_Value]) -> None:
        self._kind = kind
        self.name = f"{kind.name},..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[_Value, ...]:
        """Fails, naming the option, where one of them is of another kind."""
        if isinstance(value, tuple):
            return value
        return tuple(self._kind.convert(each.strip(), param, ctx) for each in str(value).split(","))


COUNT = click.IntRange(min=1)
POSITIVE = Number(min=0, min_open=True)
POSITIVE_OR_INF = Number(min=0, min_open=True, infinite=True)
WORKERS = max(1, min(4, (os.cpu_count() or 1) // 4))
"""Processes of a client, where nobody says."""
