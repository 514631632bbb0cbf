"""Counts and makes tokens: with a tokenizer file at hand, or by asking the server. Knows no data sets."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit

from loadtest.records import LoadTestError, Message, Target

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import httpx
    import tokenizers

    from fulcrum.v1.inference_pb2 import TokenizeRequest

COMMON_IDS = range(1000, 30_000)
"""Ids that are ordinary tokens in every vocabulary of the model families that are served."""

_TOGETHER = 32
_T = TypeVar("_T")
_R = TypeVar("_R")


class Tokenizer(Protocol):
    """Text to ids and back, many at once. Raises: LoadTestError when that cannot be done."""

    @property
    def ids(self) -> Sequence[int]:
        """The ordinary tokens to draw random prompts from, in ascending order."""

    @property
    def fillers(self) -> range:
        """The tokens with which a random prompt is filled up."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens, without added ones."""

    @property
    def specials_added(self) -> int:
        """How many tokens encode() puts around a text by itself."""

    def encode(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """The ids of each text, with the tokenizer's own BOS or EOS if `special`."""

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """The text of each list of ids."""


class LocalTokenizer:
    """A tokenizer at hand.

    Args:
        special: the tokens that no random prompt has (None: all that the tokenizer itself calls special).
    """

    def __init__(self, backend: "tokenizers.Tokenizer", special: set[str] | None = None) -> None:
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        barred = {id for id, token in added.items() if (token.special if special is None else token.content in special)}
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=False)
        self.fillers = range(self.vocab_size)
        self.ids: Sequence[int] = [token for token in range(self.vocab_size) if token not in barred]
        self.specials_added: int = self._backend.num_special_tokens_to_add(False)

    @classmethod
    def from_file(cls, path: Path) -> "LocalTokenizer":
        """That of a tokenizer.json, or of a folder that has one. Raises: LoadTestError.

        Special tokens are those that a tokenizer_config.json beside it names, which is what transformers goes by.
        """
        import tokenizers

        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            config = file.with_name("tokenizer_config.json")
            special = _named_tokens(json.loads(config.read_bytes())) if config.exists() else None
            return cls(tokenizers.Tokenizer.from_file(str(file)), special)
        except Exception as error:  # the library raises nothing narrower
            raise LoadTestError(f"{file} cannot be read as a tokenizer: {error}") from error

    def encode(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """See Tokenizer."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=special)]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """See Tokenizer."""
        return self._backend.decode_batch([list(each) for each in ids], skip_special_tokens=False)


def _named_tokens(config: dict[str, Any]) -> set[str]:
    """What a tokenizer_config.json names as eos_token and the like, and as further special tokens."""
    named = [value for key, value in config.items() if key.endswith("_token") and not isinstance(value, bool)]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(key) or []
        named += more.values() if isinstance(more, dict) else more
    return {each["content"] if isinstance(each, dict) else each for each in named if each}


class RemoteTokenizer:
    """The server's own: POST /tokenize and /detokenize, or the RPCs of the same names."""

    ids: Sequence[int] = COMMON_IDS
    fillers = COMMON_IDS
    vocab_size = COMMON_IDS.stop

    def __init__(self, target: Target) -> None:
        self._target = target

    @cached_property
    def specials_added(self) -> int:
        """See Tokenizer."""
        (bare,), (dressed,) = self.encode(["a"], special=False), self.encode(["a"])
        return len(dressed) - len(bare)

    def encode(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """See Tokenizer."""
        if self._target.backend == "grpc":
            from fulcrum.v1.inference_pb2 import TokenizeRequest

            model = self._target.model
            requests = [TokenizeRequest(model=model, text=text, add_special_tokens=special) for text in texts]
            return asyncio.run(self._rpcs(requests))
        bodies = [{"model": self._target.model, "prompt": text, "add_special_tokens": special} for text in texts]
        return [[int(token) for token in answer["tokens"]] for answer in asyncio.run(self._posts("/tokenize", bodies))]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """See Tokenizer."""
        if self._target.backend == "grpc":
            return asyncio.run(self._detokenize(ids))
        bodies = [{"model": self._target.model, "tokens": list(each)} for each in ids]
        return [str(answer["prompt"]) for answer in asyncio.run(self._posts("/detokenize", bodies))]

    def encode_chats(self, chats: Sequence[list[Message]]) -> list[list[int]]:
        """The ids of each chat as the server's template renders it, with the beginning of an answer."""
        if self._target.backend == "grpc":
            from fulcrum.v1.inference_pb2 import TokenizeRequest
            from loadtest.grpc_client import chat

            model = self._target.model
            return asyncio.run(self._rpcs([TokenizeRequest(model=model, chat=chat(each)) for each in chats]))
        bodies = [{"model": self._target.model, "messages": each} for each in chats]
        return [[int(token) for token in answer["tokens"]] for answer in asyncio.run(self._posts("/tokenize", bodies))]

    async def _posts(self, path: str, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        async with _http(self._target) as client:

            async def post(body: dict[str, Any]) -> dict[str, Any]:
                response = await client.post(path, json=body)
                if response.status_code != 200:
                    raise LoadTestError(
                        f"{self._target.url}{path} answers HTTP {response.status_code}: {response.text[:200]} "
                        "(a server without it needs --tokenizer PATH)"
                    )
                answer: dict[str, Any] = response.json()
                return answer

            return await _each(post, bodies)

    async def _rpcs(self, requests: "Sequence[TokenizeRequest]") -> list[list[int]]:
        async with _engine(self._target) as client:

            async def tokenize(request: "TokenizeRequest") -> list[int]:
                return list((await client.tokenize(request)).token_ids)

            return await _each(tokenize, requests)

    async def _detokenize(self, ids: Sequence[Sequence[int]]) -> list[str]:
        from fulcrum.v1.inference_pb2 import DetokenizeRequest

        async with _engine(self._target) as client:

            async def detokenize(tokens: Sequence[int]) -> str:
                request = DetokenizeRequest(model=self._target.model, token_ids=tokens)
                return str((await client.detokenize(request)).text)

            return await _each(detokenize, ids)


def served_model(target: Target) -> str:
    """The first model that the server names. Raises: LoadTestError when it names none or cannot be reached."""
    return asyncio.run(_served_model(target))


async def _served_model(target: Target) -> str:
    if target.backend == "grpc":
        async with _engine(target) as client:
            names = (await client.get_model()).served_names
    else:
        async with _http(target) as client:
            response = await client.get("/v1/models")
            if response.status_code != 200:
                raise LoadTestError(f"{target.url}/v1/models answers HTTP {response.status_code}: name a --model")
            names = [card["id"] for card in response.json().get("data", [])]
    if not names:
        raise LoadTestError(f"{target.url} serves no model")
    return str(names[0])


@asynccontextmanager
async def _http(target: Target) -> "AsyncGenerator[httpx.AsyncClient, None]":
    """A client for small calls; what goes wrong with the connection becomes a LoadTestError."""
    import httpx

    try:
        async with httpx.AsyncClient(base_url=target.url, headers=target.headers, timeout=60) as client:
            yield client
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise LoadTestError(f"{target.url} cannot be asked: {error or type(error).__name__}") from error


@asynccontextmanager
async def _engine(target: Target) -> "AsyncGenerator[Any, None]":
    """The same over gRPC."""
    from fulcrum.client import FulcrumClient, FulcrumError

    key = target.headers.get("authorization", "").removeprefix("Bearer ")
    parts, credentials = urlsplit(target.url), None
    if parts.scheme == "https":
        import grpc

        credentials = grpc.ssl_channel_credentials()
    try:
        async with FulcrumClient(parts.netloc, api_key=key or None, credentials=credentials) as client:
            yield client
    except FulcrumError as error:
        raise LoadTestError(f"{parts.netloc} cannot be asked: {error}") from error


async def _each(call: Callable[[_T], Awaitable[_R]], items: Sequence[_T]) -> list[_R]:
    """The answers to all items, in order, several at a time."""
    gate = asyncio.Semaphore(_TOGETHER)

    async def one(item: _T) -> _R:
        async with gate:
            return await call(item)

    return list(await asyncio.gather(*(one(item) for item in items)))
