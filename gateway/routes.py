"""The HTTP endpoints: parse, call the engine, write the answer."""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

import grpc
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fulcrum.v1 import inference_pb2 as pb
from gateway.answer import Answer, PromptRefused
from gateway.choices_format import ChatFormat, CompletionFormat, Echo, Head
from gateway.config import GatewayConfig
from gateway.engines import CallContext, EnginePool
from gateway.errors import ApiError, from_rpc, invalid, no_engine
from gateway.mapping import chat_request, completion_requests, detokenize_request, responses_request, tokenize_request
from gateway.metrics import CONTENT_TYPE, Metrics
from gateway.openapi import openapi
from gateway.parse import parse, parse_tokenize
from gateway.responses_format import ResponsesFormat
from gateway.responses_schema import ResponsesRequest
from gateway.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, Sampling, TokenizeChatRequest
from gateway.sse import HOLE, Written, around, commas
from gateway.transport import EventStream, WholeAnswer, Write, read_json, unless_gone

VERSION = version("fulcrum-llm")
FINGERPRINT = f"fulcrum-{VERSION}"
CHAT_NAMES = {"prompt": "messages"}
TOKENS_AT_ONCE = 8192
PIECE_BYTES = 64 << 10
MAX_ANSWER = 64 << 20  # characters of one that is not streamed: it is held here

Format = ChatFormat | CompletionFormat | ResponsesFormat
B = TypeVar("B")
S = TypeVar("S", bound=Sampling)
T = TypeVar("T")


class Routes:
    """The endpoints' handlers and what they share."""

    def __init__(self, config: GatewayConfig, pool: EnginePool, metrics: Metrics) -> None:
        """The pool is opened by the application's lifespan."""
        self._config = config
        self._pool = pool
        self._metrics = metrics
        # More would only share one interpreter, and take it from the streams.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="body")

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body, message = await self._body(request, partial(parse, ChatRequest), chat_request)
        names = CHAT_NAMES | ({} if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"})
        return await self._generate(request, body, [message], ChatFormat, names)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        mapped = partial(completion_requests, max_prompts=self._config.max_prompts)
        body, requests = await self._body(request, partial(parse, CompletionRequest), mapped)
        form = partial(CompletionFormat, echo=await self._echo(request, body) if body.echo else None)
        return await self._generate(request, body, requests, form, {"top_logprobs": "logprobs"})

    async def responses(self, request: Request) -> Response:
        """POST /v1/responses."""
        body, (message, names) = await self._body(request, partial(parse, ResponsesRequest), responses_request)
        return await self._generate(request, body, [message], ResponsesFormat, names)

    async def stored_response(self, request: Request) -> Response:
        """GET and DELETE /v1/responses/{id}: none is kept."""
        message = f"There is no response {request.path_params['id']!r:.200}: responses are not stored."
        raise ApiError(404, message, param="response_id", code="response_not_found")

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        raise ApiError(
            501, "Embeddings are not served: the model generates text.", "server_error", code="not_implemented"
        )

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": await self._cards(request)})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}; the id may hold slashes."""
        name = request.path_params["name"]
        for card in await self._cards(request):
            if card["id"] == name:
                return JSONResponse(card)
        raise ApiError(404, f"The model {name!r:.200} does not exist.", param="model", code="model_not_found")

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: of a prompt, or of a chat's messages."""
        body, message = await self._body(request, parse_tokenize, tokenize_request)
        names = CHAT_NAMES if isinstance(body, TokenizeChatRequest) else {}
        reply = await self._call(request, "Tokenize", message, names)
        count, written = len(reply.token_ids), Written()
        told = ["tokens", "token_strs"] if body.return_token_strs else ["tokens"]
        for at in range(0, count, TOKENS_AT_ONCE):
            texts = reply.token_bytes[at : at + TOKENS_AT_ONCE] if body.return_token_strs else ()
            lists = {"token_strs": [text.decode(errors="replace") for text in texts]}
            written.add(lists | {"tokens": list(reply.token_ids[at : at + TOKENS_AT_ONCE])})
            await asyncio.sleep(0)
        answer = {"count": count, "max_model_len": reply.max_model_len, **{name: [HOLE] for name in told}}
        answer.setdefault("token_strs", None)
        return WholeAnswer(await in_pieces(around(answer, *(commas(written[name]) for name in told))))

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        _, message = await self._body(request, partial(parse, DetokenizeRequest), detokenize_request)
        reply = await self._call(request, "Detokenize", message, {"prompt": "tokens"})
        return JSONResponse({"prompt": reply.text})

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while an engine is SERVING."""
        if not self._pool.serving:
            raise no_engine()
        return JSONResponse({"status": "ok"})

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json."""
        return JSONResponse(openapi(VERSION))

    async def livez(self, request: Request) -> Response:
        """GET /livez: the process answers."""
        return JSONResponse({"status": "ok"})

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return JSONResponse({"version": VERSION})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def _generate(
        self,
        request: Request,
        body: S,
        requests: list[pb.GenerateRequest],
        form: Callable[[Head, int, S], Format],
        names: dict[str, str],
    ) -> Response:
        """Runs the Generates and answers with their text, streamed or whole. Until all are accepted no byte is sent."""
        if (given := body.constraint) is not None:
            names = names | {given.field: given.param}
        opening = Answer.open(self._pool, requests, body.n or 1, self._context(request))
        answer = await self._engine(request, opening, names)
        request.state.engine_id = answer.request_id
        head = Head(answer.request_id, int(time.time()), body.model or answer.model, FINGERPRINT)
        shape = form(head, answer.choices, body)
        if body.stream:
            source = partial(self._write, request, answer, shape, names)
            return EventStream(source, self._config.heartbeat_seconds, answer.close, shape.failed)
        return WholeAnswer(await self._engine(request, self._whole(request, answer, shape), names))

    async def _whole(self, request: Request, answer: Answer, shape: Format) -> list[bytearray]:
        size = shape.size
        try:
            while (told := await answer.next()) is not None:
                index, event = told
                if isinstance(event, pb.Delta):
                    size += shape.keep(index, event)
                elif isinstance(event, pb.Finished):
                    shape.keep_ending(index, event)
                elif isinstance(event, pb.PromptLogprobs):
                    size += shape.keep_prompt(range(index, index + answer.n), event.tokens)
                if size > MAX_ANSWER:
                    text = f"The answer is larger than {MAX_ANSWER >> 20} MiB: ask for less at a time, or for a stream."
                    raise ApiError(400, text, code="answer_too_large")
        finally:
            self._done(request, answer)
        return await in_pieces(shape.whole(answer.counts))

    async def _write(
        self, request: Request, answer: Answer, shape: Format, names: dict[str, str], write: Write
    ) -> bytes:
        """Writes the event stream; returns its end: [DONE], or an error event and no [DONE]."""
        try:
            for chunk in shape.opening():
                await write(chunk)
                await asyncio.sleep(0)  # a socket with room makes nobody wait, nor does one whose client has gone
            while (told := await answer.next()) is not None:
                index, event = told
                if isinstance(event, pb.Delta):
                    if chunk := shape.delta(index, event):
                        await write(chunk)
                elif isinstance(event, pb.Finished):
                    await write(shape.ending(index, event))
                elif isinstance(event, pb.Started):
                    shape.started(range(index, index + answer.n), event)
                else:
                    for chunk in shape.prompt(range(index, index + answer.n), event.tokens):
                        await write(chunk)
                        await asyncio.sleep(0)
            return shape.closing(answer.counts)
        except (grpc.aio.AioRpcError, ApiError) as error:
            fault = error if isinstance(error, ApiError) else from_rpc(error, names, request.state.request_id)
            self._metrics.stream_errors.labels(str(fault.status)).inc()
            return shape.failed(fault)
        finally:
            self._done(request, answer)

    def _done(self, request: Request, answer: Answer) -> None:
        """Stops what still runs, and counts."""
        answer.close()
        self._metrics.count_tokens(answer.counts)
        if answer.first_text_at is not None:
            self._metrics.first_text_seconds.observe(answer.first_text_at - request.state.arrival)

    async def _body(
        self, request: Request, read: Callable[[dict[str, Any]], B], mapped: Callable[[B], T]
    ) -> tuple[B, T]:
        """What a request asks for, and what is made of it for the engine. Raises: as read_json."""

        def both(fields: dict[str, Any]) -> tuple[B, T]:
            return (body := read(fields)), mapped(body)

        config = self._config
        return await read_json(request, config.max_body_bytes, config.arrival_seconds, both, self._threads)

    def _context(self, request: Request) -> CallContext:
        """The label and the deadline: the caller's x-request-timeout or the gateway's limit, whichever is shorter."""
        limits = [self._config.request_timeout] if self._config.request_timeout is not None else []
        if (asked := request.headers.get("x-request-timeout")) is not None:
            limits.append(seconds(asked))
        deadline = request.state.arrival + min(limits) if limits else None
        return CallContext(request.state.request_id, deadline, (*request.state.caller, *request.state.trace))

    async def _call(self, request: Request, method: str, message: Any, names: dict[str, str]) -> Any:
        return await self._engine(request, self._pool.call(method, message, self._context(request)), names)

    async def _engine(self, request: Request, work: Coroutine[Any, Any, T], names: dict[str, str]) -> T:
        """Awaits engine work unless the client goes. Raises: ApiError for the engine's refusal; ClientDisconnect."""
        try:
            return await unless_gone(request.receive, work)
        except PromptRefused as refused:
            which = f"prompt[{refused.number}]"
            told = from_rpc(refused.error, names | {"prompt": which}, request.state.request_id)
            if told.status == 400 and not (told.param or "").startswith(which):
                told.message += f" (of {which})"
            raise told from refused
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, names, request.state.request_id) from error

    async def _echo(self, request: Request, body: CompletionRequest) -> list[Echo]:
        """Each choice's prompt."""
        model = body.model or ""

        async def text_of(ids: list[int], names: dict[str, str]) -> str:
            message = pb.DetokenizeRequest(model=model, token_ids=ids)
            text: str = (await self._call(request, "Detokenize", message, names)).text
            return text

        echoes: list[Echo] = []
        prompts: Sequence[str | list[int]] = body.prompt
        for number, prompt in enumerate(prompts):
            names = {"prompt": f"prompt[{number}]"} if len(prompts) > 1 else {}
            first = b""
            if isinstance(prompt, str):
                text = prompt
                if body.logprobs is not None:
                    pieces = await self._call(request, "Tokenize", pb.TokenizeRequest(model=model, text=prompt), names)
                    first = b"".join(pieces.token_bytes[:1])
            else:
                text = await text_of(prompt, names)
                if body.logprobs is not None:
                    alone = await text_of(prompt[:1], names)
                    first = alone.encode()
                    if not text.startswith(alone):  # it ends within a character, of which each byte behind is a U+FFFD
                        missing = len(await text_of(prompt[1:], names)) - len(text) + len(alone)
                        first = text[: len(alone)].encode()[:-missing]
            echoes += [Echo(text, first)] * (body.n or 1)
        return echoes

    async def _cards(self, request: Request) -> list[dict[str, Any]]:
        reply = await self._call(request, "GetModel", pb.GetModelRequest(), {})
        about = {"created": reply.created, "owned_by": "fulcrum", "max_model_len": reply.max_model_len}
        return [{"id": name, "object": "model"} | about for name in reply.served_names]


async def in_pieces(texts: Iterable[str]) -> list[bytearray]:
    """The texts, encoded; nobody waits for all of them."""
    pieces = [bytearray()]
    for text in texts:
        if len(pieces[-1]) > PIECE_BYTES:
            pieces.append(bytearray())
            await asyncio.sleep(0)
        pieces[-1] += text.encode()
    return pieces


def seconds(text: str) -> float:
    """A positive number of seconds. Raises: ApiError 400."""
    try:
        value = math.nan if "_" in text else float(text)  # 1_0 is a number to Python alone
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise invalid("x-request-timeout", "must be a positive number of seconds")
    return value
