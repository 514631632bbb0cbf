"""Logprobs as OpenAI's and vLLM's JSON. Knows no stream and no engine."""

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from fulcrum.v1 import inference_pb2 as pb

Logprobs = Sequence[pb.TokenLogprob]

# Of a text completion's choice.
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

# JSON has no infinities: what is less likely (or no number) counts as this, as with OpenAI and vLLM.
LEAST = -9999.0


def finite(logprob: float) -> float:
    """A number that JSON has."""
    return logprob if logprob > LEAST else LEAST


def token_text(raw: bytes, broken: str = "") -> str:
    r"""A token as text; behind the prefix `broken`, and with its other bytes as `\xf0`, where it is no whole text."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return broken + raw.decode(errors="backslashreplace")


def token_logprobs(tokens: Iterable[pb.TokenLogprob]) -> list[dict[str, Any]]:
    """OpenAI's entries: the `logprobs.content` of a chat's choice or chunk, the `logprobs` of a response's text."""

    def entry(one: pb.TokenLogprob | pb.TopLogprob) -> dict[str, Any]:
        return {"token": token_text(one.bytes), "logprob": finite(one.logprob), "bytes": list(one.bytes)}

    return [entry(token) | {"top_logprobs": [entry(one) for one in token.top]} for token in tokens]


def prompt_logprobs(tokens: Logprobs, top: int) -> list[dict[str, Any]]:
    """vLLM's `prompt_logprobs`: for each token of the prompt, but its first, the logprobs by token id."""

    def entry(one: pb.TokenLogprob | pb.TopLogprob) -> dict[str, Any]:
        return {"logprob": finite(one.logprob), "decoded_token": token_text(one.bytes)}

    return [
        {str(token.token_id): entry(token)} | {str(one.token_id): entry(one) for one in token.top[:top]}
        for token in tokens
    ]


class Offsets:
    """Where in a text each of its tokens begins, in characters: one that begins within a character begins with it."""

    def __init__(self, start: int = 0) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._end = start

    @property
    def begun(self) -> bool:
        """Whether a token has added something."""
        return self._end > 0 or bool(self._utf8.getstate()[0])

    def next(self, raw: bytes, within: str | None = None) -> int:
        """The offset of the next token. It adds these bytes to the text, but what is not there in the text `within`."""
        state = self._utf8.getstate()
        # It begins a character: one that is not complete yet has ended as U+FFFD.
        before = self._utf8.decode(b"", final=True) if raw and raw[0] & 0xC0 != 0x80 else ""
        text = self._utf8.decode(raw)
        if within is not None and not within.startswith(before + text, self._end):
            self._utf8.setstate(state)
            return self._end
        offset = self._end + len(before)
        self._end = offset + len(text)
        return offset


class ContentTokens:
    """Finds the tokens of an answer's content among those of reasoning, calls and markers, by what they say.

    Content lags behind its tokens and is a part of their text, in order: it goes on where it ended, or behind a marker.
    """

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._texts: list[str] = []  # behind the last content
        self._end = 0  # of all that came, in characters
        self._tokens: deque[tuple[int, int, pb.TokenLogprob]] = deque()  # and where their texts begin and end

    def add(self, tokens: Logprobs) -> None:
        """The next tokens of the answer."""
        for token in tokens:
            begin = self._end
            if not token.hidden:
                self._texts.append(self._utf8.decode(token.bytes))
                self._end += len(self._texts[-1])
            self._tokens.append((begin, self._end, token))

    def next(self, content: str, reasoning: str = "") -> list[pb.TokenLogprob]:
        """Those of the next piece of the content, each once. What was before it, such as this reasoning, is not."""
        if not (self._tokens or self._texts):  # mostly, none are asked for
            return []
        text = "".join(self._texts)
        thought = text.find(reasoning)
        behind = thought + len(reasoning) if thought >= 0 else 0
        begins = text.startswith(content, behind) and self._may_end_at(text, behind + len(content))
        at = behind if begins else text.rfind(content)
        if at < 0:
            return self.rest()
        begin = self._end - len(text) + at
        end = begin + len(content)
        found = []
        while self._tokens and self._tokens[0][0] < end:
            first, last, token = self._tokens.popleft()
            if first == begin or last > begin:
                found.append(token)
        self._texts = [text[at + len(content) :]]
        return found

    def _may_end_at(self, text: str, at: int) -> bool:
        """Whether content that ends there is no part of a marker's token: what is held back begins a marker itself."""
        end = self._end - len(text) + at
        for first, last, _ in self._tokens:
            if last > end:
                held = text[at : at + last - end].lstrip() if first < end else ""
                return not held or held[0] in "<["
        return True

    def rest(self) -> list[pb.TokenLogprob]:
        """Those that are left: of what never became content, or of nothing."""
        found = [token for *_, token in self._tokens]
        self._texts.clear()
        self._tokens.clear()
        return found


class TextLogprobs:
    """The `logprobs` of a text completion's choice, as it grows.

    Args:
        top: how many of the likeliest tokens are told.
        echo: the prompt, if it is a part of the text.
    """

    def __init__(self, top: int, echo: str = "") -> None:
        self._top = top
        self._echo = echo
        self._in_echo, self._in_answer = Offsets(), Offsets(len(echo))

    def first(self, raw: bytes) -> dict[str, Any]:
        """Of the prompt's first token, which has no logprob."""
        text = token_text(raw, "bytes:")
        return {"tokens": [text], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [self._echoed(raw)]}

    def prompt(self, tokens: Logprobs) -> dict[str, Any]:
        """Of the prompt's next tokens."""
        return self._of(tokens, [self._echoed(token.bytes) for token in tokens])

    def answer(self, tokens: Logprobs) -> dict[str, Any]:
        """Of the next generated tokens."""
        return self._of(tokens, [self._in_answer.next(b"" if token.hidden else token.bytes) for token in tokens])

    def _echoed(self, raw: bytes) -> int:
        """The offset of a token of the prompt: one that the tokenizer added (as BOS) takes no place."""
        if not self._in_echo.begun and raw[:1] == b" " and not self._echo.startswith(" "):
            raw = raw[1:]  # SentencePiece's, before the first word
        return self._in_echo.next(raw, within=self._echo)

    def _of(self, tokens: Logprobs, offsets: list[int]) -> dict[str, Any]:
        return {
            "tokens": [token_text(token.bytes, "bytes:") for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [self._likeliest(token) for token in tokens],
            "text_offset": offsets,
        }

    def _likeliest(self, token: pb.TokenLogprob) -> dict[str, float]:
        """By their texts; the token itself is always there."""
        found: dict[str, float] = {}
        tokens: list[pb.TokenLogprob | pb.TopLogprob] = [*token.top[: self._top], token]
        for one in tokens:
            found.setdefault(token_text(one.bytes, "bytes:"), finite(one.logprob))
        return found
