"""Counts and makes tokens: with a tokenizer file at hand, or by asking the server. Knows no data sets."""

import json
import ssl
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from fulcrum.client import FulcrumError
from fulcrum.sync_client import SyncFulcrumClient
from fulcrum.v1.inference_pb2 import DetokenizeRequest, TokenizeRequest
from loadtest.grpc_client import chat, connection
from loadtest.records import Content, LoadTestError, Message, Target, messages_of

if TYPE_CHECKING:
    import tokenizers

COMMON_IDS = range(1000, 30_000)
"""Ids that are ordinary tokens in every vocabulary of the model families that are served."""

_TOGETHER = 32


class LocalTokenizer:
    """A tokenizer at hand.

    `special` are the tokens that no random prompt has (None: all that the tokenizer itself calls special).
    """

    def __init__(self, backend: "tokenizers.Tokenizer", special: set[str] | None = None) -> None:
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        barred = {id for id, token in added.items() if (token.special if special is None else token.content in special)}
        # Random prompts are filled up with all but added tokens, and drawn from the ordinary ones in ascending order.
        self.fillers = range(self._backend.get_vocab_size(with_added_tokens=False))
        self.ids: Sequence[int] = [token for token in self.fillers if token not in barred]
        self.specials_added: int = self._backend.num_special_tokens_to_add(False)  # by encode(), by itself

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
        return self._each("/tokenize", [{"prompt": text, "add_special_tokens": special} for text in texts], "tokens")

    def encode_chats(self, chats: Sequence[list[Message]]) -> list[list[int]]:
        """The ids of each chat as the server's template renders it, with the beginning of an answer."""
        return self._each("/tokenize", [{"messages": messages} for messages in chats], "tokens")

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """See LocalTokenizer."""
        return self._each("/detokenize", [{"tokens": list(each)} for each in ids], "prompt")

    def _each(self, path: str, bodies: Sequence[dict[str, Any]], field: str) -> list[Any]:
        """That field of the answers to all, in order; several are asked at a time."""
        if not bodies:
            return []
        with _asked(self._target) as ask, ThreadPoolExecutor(_TOGETHER) as threads:
            return [answer[field] for answer in threads.map(lambda body: ask(path, body), bodies)]


Tokenizer = LocalTokenizer | RemoteTokenizer


def token_ids(tokenizer: Tokenizer, contents: Sequence[Content]) -> list[list[int]]:
    """The ids of each of these: of a text, of a chat, or the ids that it is."""
    texts = iter(tokenizer.encode([content for content in contents if isinstance(content, str)]))
    chats = iter(tokenizer.encode_chats([messages for content in contents if (messages := messages_of(content))]))

    def ids(content: Content) -> list[int]:
        if isinstance(content, str):
            return next(texts)
        return next(chats) if messages_of(content) else [token for token in content if isinstance(token, int)]

    return [ids(content) for content in contents]


def served_model(target: Target) -> str:
    """The first model that the server names. Raises: LoadTestError when it names none or cannot be reached."""
    with _asked(target) as ask:
        cards = ask("/v1/models", None).get("data")
    if not cards:
        raise LoadTestError(f"{target.url} serves no model")
    return str(cards[0]["id"])


@contextmanager
def _asked(target: Target) -> Iterator[Callable[[str, dict[str, Any] | None], dict[str, Any]]]:
    """Asks for small things: for the answer to a path and a body (None: GET), be it by the RPC that it stands for.

    What goes wrong with the connection becomes a LoadTestError.
    """

    def posted(path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        answer = http.get(path) if body is None else http.post(path, json={"model": target.model, **body})
        if answer.status_code != 200:
            said = f"HTTP {answer.status_code}: {answer.text[:200]}"
            raise LoadTestError(f"{answer.url} answers {said} (not needed with --model and --tokenizer)")
        return dict(answer.json())

    def called(path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        if body is None:
            return {"data": [{"id": name} for name in rpc.get_model().served_names]}
        if path == "/detokenize":
            return {"prompt": rpc.detokenize(DetokenizeRequest(model=target.model, token_ids=body["tokens"])).text}
        request = TokenizeRequest(model=target.model)
        if "messages" in body:
            request.chat.CopyFrom(chat(body["messages"]))
        else:
            request.text, request.add_special_tokens = body["prompt"], body["add_special_tokens"]
        return {"tokens": list(rpc.tokenize(request).token_ids)}

    try:
        if target.backend == "grpc":
            address, credentials, metadata = connection(target)
            with SyncFulcrumClient(address, credentials=credentials, metadata=metadata) as rpc:
                yield called
        else:
            # As the load goes: without proxies, and trusting whom the system trusts.
            tls = ssl.create_default_context()
            with httpx.Client(
                base_url=target.url, headers=target.headers, timeout=60, verify=tls, trust_env=False
            ) as http:
                yield posted
    except (httpx.HTTPError, httpx.InvalidURL, FulcrumError, ValueError) as error:
        raise LoadTestError(f"{target.url} cannot be asked: {error or type(error).__name__}") from error
