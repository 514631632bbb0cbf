"""What a command's sampling options ask of a request."""

from typing import Any

from cli.settings import Params
from fulcrum.v1 import inference_pb2 as pb


def fields(params: Params) -> dict[str, Any]:
    """Fields of GenerateRequest."""
    sampling = {name: params[name] for name in ("temperature", "top_p", "top_k", "seed")}
    stopping = pb.StoppingCriteria(max_tokens=params["max_tokens"], stop=params["stop"])
    return {"sampling": pb.SamplingParams(**sampling), "stopping": stopping}


def system(params: Params) -> list[tuple[str, str]]:
    """The messages that every chat begins with."""
    return [("system", params["system"])] if params["system"] else []
