"""Tokens in, tokens out: scheduler, KV pool, radix tree, model, sampler, core process. Knows no text and no network.

`import engine` loads no torch; touching `LLM` does.
"""

from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.request import FinishReason, Request, SamplingParams

if TYPE_CHECKING:
    from engine.llm import LLM

__all__ = ["LLM", "EngineConfig", "FinishReason", "Request", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
