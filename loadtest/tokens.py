"""Counts and makes tokens: with a tokenizer file at hand, or by asking the server. Knows no data sets."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit

import grpc
import httpx

from fulcrum.client import FulcrumError
from fulcrum.sync_client import SyncFulcrumClient
from fulcrum.v1.inference_pb2 import DetokenizeRequest, TokenizeRequest
from loadtest.grpc_client import chat
from loadtest.records import LoadTestError, Message, Target

if TYPE_CHECKING:
    import tokenizers

COMMON_IDS = range(1000, 30_000)
"""Ids that are ordinary tokens in every vocabulary of the model families that are served."""

_TOGETHER = 32
_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


class Tokenizer(Protocol):
    """Text to ids and back, many at once. Raises: LoadTestError when that cannot be done."""

    @property
    def ids(self) -> Sequence[int]:
        """The ordinary tokens to draw random prompts from, in ascending order."""

    @property
    def fillers(self) -> range:
        """The tokens with which a random prompt is filled up: of a tokenizer at hand all but added ones."""

    @property
    def specials_added(self) -> int:
        """How many tokens encode() puts around a text by itself."""

    def encode(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """The ids of each text, with the tokenizer's own BOS or EOS if `special`."""

    def encode_chats(self, chats: Sequence[list[Message]]) -> list[list[int]]:
        """The ids of each chat: as the server's template renders it, with the beginning of an answer; here without."""

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
        self.fillers = range(self._backend.get_vocab_size(with_added_tokens=False))
        self.ids: Sequence[int] = [token for token in self.fillers if token not in barred]
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

    def encode_chats(self, chats: Sequence[list[Message]]) -> list[list[int]]:
        """See Tokenizer."""
        return self.encode(["\n".join(each["content"] for each in messages) for messages in chats])

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


class _HttpServer:
    """What an OpenAI server with vLLM's /tokenize and /detokenize tells."""

    def __init__(self, target: Target) -> None:
        self._url, self._model = target.url, target.model
        self.client = httpx.Client(base_url=target.url, headers=target.headers, timeout=60)

    def models(self) -> list[str]:
        return [card["id"] for card in self._asked("GET", "/v1/models", "name a --model").get("data", [])]

    def tokenize(self, prompt: str | list[Message], **settings: Any) -> list[int]:
        kind = "prompt" if isinstance(prompt, str) else "messages"
        return [int(token) for token in self._posted("/tokenize", {kind: prompt, **settings})["tokens"]]

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._posted("/detokenize", {"tokens": list(ids)})["prompt"])

    def _posted(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        hint = f"a server without {path} needs --tokenizer PATH"
        return self._asked("POST", path, hint, json={"model": self._model, **body})

    def _asked(self, method: str, path: str, hint: str, **more: Any) -> dict[str, Any]:
        response = self.client.request(method, path, **more)
        if response.status_code != 200:
            answer = f"HTTP {response.status_code}: {response.text[:200]}"
            raise LoadTestError(f"{self._url}{path} answers {answer} ({hint})")
        answered: dict[str, Any] = response.json()
        return answered


class _GrpcServer:
    """The same of a Fulcrum engine."""

    def __init__(self, target: Target) -> None:
        parts, self._model = urlsplit(target.url), target.model
        credentials = grpc.ssl_channel_credentials() if parts.scheme == "https" else None
        metadata = tuple((name.lower(), value) for name, value in target.headers.items())
        self.client = SyncFulcrumClient(parts.netloc, credentials=credentials, metadata=metadata)

    def models(self) -> list[str]:
        return list(self.client.get_model().served_names)

    def tokenize(self, prompt: str | list[Message], **settings: Any) -> list[int]:
        request = TokenizeRequest(model=self._model, **settings)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.chat.CopyFrom(chat(prompt))
        return list(self.client.tokenize(request).token_ids)

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self.client.detokenize(DetokenizeRequest(model=self._model, token_ids=ids)).text)


@contextmanager
def _server(target: Target) -> Iterator[_HttpServer | _GrpcServer]:
    """What goes wrong with the connection becomes a LoadTestError."""
    try:
        server = _GrpcServer(target) if target.backend == "grpc" else _HttpServer(target)
        with server.client:
            yield server
    except (httpx.HTTPError, httpx.InvalidURL, FulcrumError, ValueError) as error:
        raise LoadTestError(f"{target.url} cannot be asked: {error or type(error).__name__}") from error


class RemoteTokenizer:
    """The server's own: POST /tokenize and /detokenize, or the RPCs of the same names."""

    ids: Sequence[int] = COMMON_IDS
    fillers = COMMON_IDS

    def __init__(self, target: Target) -> None:
        self._target = target

    @cached_property
    def specials_added(self) -> int:
        """See Tokenizer."""
        (bare,), (dressed,) = self.encode(["a"], special=False), self.encode(["a"])
        return len(dressed) - len(bare)

    def encode(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """See Tokenizer."""
        return self._each(lambda server, text: server.tokenize(text, add_special_tokens=special), texts)

    def encode_chats(self, chats: Sequence[list[Message]]) -> list[list[int]]:
        """See Tokenizer."""
        return self._each(lambda server, messages: server.tokenize(messages), chats)

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """See Tokenizer."""
        return self._each(lambda server, each: server.detokenize(each), ids)

    def _each(
        self, ask: Callable[[_HttpServer | _GrpcServer, _Item], _Answer], items: Iterable[_Item]
    ) -> list[_Answer]:
        """The answers to all items, in order, several at a time."""
        with _server(self._target) as server, ThreadPoolExecutor(_TOGETHER) as threads:
            return list(threads.map(lambda item: ask(server, item), items))


def served_model(target: Target) -> str:
    """The first model that the server names. Raises: LoadTestError when it names none or cannot be reached."""
    with _server(target) as server:
        names = server.models()
    if not names:
        raise LoadTestError(f"{target.url} serves no model")
    return names[0]
