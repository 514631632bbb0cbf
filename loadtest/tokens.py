"""Counts and makes tokens: with a tokenizer file at hand, or by asking the server. Knows no data sets."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import grpc
import httpx

from fulcrum.client import FulcrumError
from fulcrum.sync_client import SyncFulcrumClient
from fulcrum.v1.inference_pb2 import DetokenizeRequest, TokenizeRequest
from loadtest.grpc_client import chat
from loadtest.records import Content, LoadTestError, Message, Target, messages_of

if TYPE_CHECKING:
    import tokenizers

COMMON_IDS = range(1000, 30_000)
"""Ids that are ordinary tokens in every vocabulary of the model families that are served."""

_TOGETHER = 32
_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


class LocalTokenizer:
    """A tokenizer at hand.

    Args:
        special: the tokens that no random prompt has (None: all that the tokenizer itself calls special).

    Attributes:
        fillers: the tokens with which a random prompt is filled up: all but added ones.
        ids: the ordinary tokens to draw random prompts from, in ascending order.
        specials_added: how many tokens encode() puts around a text by itself.
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
        """The ids of each text, with the tokenizer's own BOS or EOS if `special`."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=special)]

    def encode_chats(self, chats: Sequence[list[Message]]) -> list[list[int]]:
        """The ids of each chat, without a template."""
        return self.encode(["\n".join(each["content"] for each in messages) for messages in chats])

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """The text of each list of ids."""
        return self._backend.decode_batch([list(each) for each in ids], skip_special_tokens=False)


def _named_tokens(config: dict[str, Any]) -> set[str]:
    """What a tokenizer_config.json names as eos_token and the like, and as further special tokens."""
    named = [value for key, value in config.items() if key.endswith("_token") and not isinstance(value, bool)]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(key) or []
        named += more.values() if isinstance(more, dict) else more
    return {each["content"] if isinstance(each, dict) else each for each in named if each}


_Server = httpx.Client | SyncFulcrumClient


class RemoteTokenizer:
    """The server's own: POST /tokenize and /detokenize, or the RPCs of the same names. Raises: LoadTestError."""

    ids: Sequence[int] = COMMON_IDS
    fillers = COMMON_IDS

    def __init__(self, target: Target) -> None:
        self._target = target

    @cached_property
    def specials_added(self) -> int:
        """See LocalTokenizer."""
        (bare,), (dressed,) = self.encode(["a"], special=False), self.encode(["a"])
        return len(dressed) - len(bare)

    def encode(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """See LocalTokenizer."""
        if self._target.backend == "grpc":
            return self._tokenized([TokenizeRequest(text=text, add_special_tokens=special) for text in texts])
        return self._tokenized([{"prompt": text, "add_special_tokens": special} for text in texts])

    def encode_chats(self, chats: Sequence[list[Message]]) -> list[list[int]]:
        """The ids of each chat as the server's template renders it, with the beginning of an answer."""
        if self._target.backend == "grpc":
            return self._tokenized([TokenizeRequest(chat=chat(messages)) for messages in chats])
        return self._tokenized([{"messages": messages} for messages in chats])

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """See LocalTokenizer."""

        def detokenized(server: _Server, tokens: Sequence[int]) -> str:
            if isinstance(server, httpx.Client):
                return str(self._posted(server, "/detokenize", {"tokens": list(tokens)})["prompt"])
            request = DetokenizeRequest(model=self._target.model, token_ids=tokens)
            return str(server.detokenize(request).text)

        return self._each(detokenized, ids)

    def _tokenized(self, requests: Sequence[TokenizeRequest] | Sequence[dict[str, Any]]) -> list[list[int]]:
        def tokenized(server: _Server, request: Any) -> list[int]:
            if isinstance(server, httpx.Client):
                return [int(token) for token in self._posted(server, "/tokenize", request)["tokens"]]
            request.model = self._target.model
            return list(server.tokenize(request).token_ids)

        return self._each(tokenized, requests)

    def _posted(self, server: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = server.post(path, json={"model": self._target.model, **body})
        return _answered(response, "a server without it needs --tokenizer PATH")

    def _each(self, ask: Callable[[_Server, _Item], _Answer], items: Iterable[_Item]) -> list[_Answer]:
        """The answers to all items, in order, several at a time."""
        with _asked(self._target) as server, ThreadPoolExecutor(_TOGETHER) as threads:
            return list(threads.map(lambda item: ask(server, item), items))


Tokenizer = LocalTokenizer | RemoteTokenizer


def token_ids(tokenizer: Tokenizer, contents: Sequence[Content]) -> list[list[int]]:
    """The ids of each of these: of a text, of a chat, or the ids that it is."""
    texts = [content for content in contents if isinstance(content, str)]
    chats = [messages for content in contents if (messages := messages_of(content))]
    encoded = iter(tokenizer.encode(texts) if texts else ())
    rendered = iter(tokenizer.encode_chats(chats) if chats else ())
    found = []
    for content in contents:
        ids = next(encoded) if isinstance(content, str) else next(rendered) if messages_of(content) else content
        found.append([token for token in ids if isinstance(token, int)])
    return found


def served_model(target: Target) -> str:
    """The first model that the server names. Raises: LoadTestError when it names none or cannot be reached."""
    with _asked(target) as server:
        if isinstance(server, httpx.Client):
            names = [card["id"] for card in _answered(server.get("/v1/models"), "name a --model").get("data", [])]
        else:
            names = list(server.get_model().served_names)
    if not names:
        raise LoadTestError(f"{target.url} serves no model")
    return str(names[0])


def _answered(response: httpx.Response, hint: str) -> dict[str, Any]:
    if response.status_code != 200:
        answer = f"HTTP {response.status_code}: {response.text[:200]}"
        raise LoadTestError(f"{response.url} answers {answer} ({hint})")
    fields: dict[str, Any] = response.json()
    return fields


@contextmanager
def _asked(target: Target) -> Iterator[_Server]:
    """A client for small calls; what goes wrong with the connection becomes a LoadTestError."""
    server: _Server
    try:
        if target.backend == "grpc":
            parts = urlsplit(target.url)
            credentials = grpc.ssl_channel_credentials() if parts.scheme == "https" else None
            metadata = tuple((name.lower(), value) for name, value in target.headers.items())
            server = SyncFulcrumClient(parts.netloc, credentials=credentials, metadata=metadata)
        else:
            server = httpx.Client(base_url=target.url, headers=target.headers, timeout=60)
        with server:
            yield server
    except (httpx.HTTPError, httpx.InvalidURL, FulcrumError, ValueError) as error:
        raise LoadTestError(f"{target.url} cannot be asked: {error or type(error).__name__}") from error
