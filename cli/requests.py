"""GenerateRequests out of a command's sampling options. Knows the contract alone."""

from cli.settings import Params
from fulcrum.client import message
from fulcrum.v1 import inference_pb2 as pb


def chat_request(messages: list[pb.ChatMessage], params: Params) -> pb.GenerateRequest:
    """Asks for the conversation's next message."""
    system = [message("system", params["system"])] if params["system"] else []
    return _with_options(pb.GenerateRequest(chat=pb.Chat(messages=[*system, *messages])), params)


def text_request(text: str, params: Params) -> pb.GenerateRequest:
    """Asks for a continuation of the text."""
    return _with_options(pb.GenerateRequest(text=text), params)


def _with_options(request: pb.GenerateRequest, params: Params) -> pb.GenerateRequest:
    for name in ("temperature", "top_p", "top_k", "seed"):
        if params[name] is not None:
            setattr(request.sampling, name, params[name])
    if params["max_tokens"] is not None:
        request.stopping.max_tokens = params["max_tokens"]
    request.stopping.stop.extend(params["stop"])
    return request
