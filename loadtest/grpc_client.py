"""Asks a Fulcrum engine for streamed answers over gRPC and notes when each event comes. Tries nothing twice."""

import itertools
import time
from collections.abc import Iterable
from urllib.parse import urlsplit

import grpc
import grpc.aio

from fulcrum.client import FulcrumError, message, open_channel
from fulcrum.v1.inference_pb2 import Chat, GenerateRequest, OutputOptions, SamplingParams, StoppingCriteria
from fulcrum.v1.inference_pb2_grpc import InferenceServiceStub
from loadtest.records import Message, Prompt, Record, Target, messages_of

_CHANNELS = 4  # so that one worker reaches several service processes behind one port
_OPTIONS = (("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1))


class GrpcClient:
    """Sends prompts to the engine of a target. Made inside a running event loop."""

    def __init__(self, target: Target) -> None:
        self._target = target
        address, credentials, self._metadata = connection(target)
        self._channels = [open_channel(address, credentials, _OPTIONS) for _ in range(_CHANNELS)]
        self._stubs = itertools.cycle([InferenceServiceStub(channel) for channel in self._channels])

    async def send(self, request: GenerateRequest, record: Record) -> None:
        """Fills `record` with what comes of the request. Raises nothing but a cancellation."""
        times: list[float] = []
        pieces, finished = [], False
        call = next(self._stubs).Generate(request, metadata=self._metadata)
        try:
            async for response in call:
                kind = response.WhichOneof("event")
                if kind == "delta":
                    times.append(time.perf_counter())
                    pieces.append(response.delta.text)
                elif kind == "finished":
                    record.latency = time.perf_counter() - record.start
                elif kind == "usage":
                    finished, usage = True, response.usage
                    record.prompt_tokens, record.output_tokens = usage.prompt_tokens, usage.completion_tokens
                    record.cached_tokens = usage.cached_tokens
        except grpc.aio.AioRpcError as error:
            record.error = str(FulcrumError.from_rpc(error))[:300]
        finally:
            call.cancel()
        record.text = "".join(pieces)
        record.heard(times)
        if not record.error and not finished:
            record.error = "truncated: the stream ended without usage"
        elif not record.error and not (times and record.output_tokens):
            record.error = "empty: the answer has no tokens"

    async def close(self) -> None:
        """Ends the connections."""
        for channel in self._channels:
            await channel.close()

    def request(self, prompt: Prompt) -> GenerateRequest:
        """What is sent. Raises: ValueError, TypeError, LookupError (half a character, a wrong token id, no content)."""
        request = GenerateRequest(
            model=self._target.model,
            sampling=SamplingParams(**self._target.sampling),  # type: ignore[arg-type]
            stopping=StoppingCriteria(max_tokens=prompt.output_len, ignore_eos=self._target.ignore_eos),
            # Ids, so that a token whose text is held back is an event all the same.
            output=OutputOptions(token_ids=True),
        )
        if prompt.salt:
            request.cache.salt = prompt.salt
        if isinstance(prompt.content, str):
            request.text = prompt.content
        elif isinstance(prompt.content[0], int):
            request.token_ids.ids.extend(prompt.content)
        else:
            request.chat.CopyFrom(chat(messages_of(prompt.content)))
        return request


def chat(messages: Iterable[Message]) -> Chat:
    """These messages as the contract has them."""
    return Chat(messages=[message(each["role"], each["content"]) for each in messages])


def connection(target: Target) -> tuple[str, grpc.ChannelCredentials | None, tuple[tuple[str, str], ...]]:
    """Address, credentials and metadata of the calls to an engine."""
    parts = urlsplit(target.url)
    credentials = grpc.ssl_channel_credentials() if parts.scheme == "https" else None
    return parts.netloc, credentials, tuple((name.lower(), value) for name, value in target.headers.items())
