"""Logprobs from the engine's records to the contract's messages. Knows no request."""

from collections.abc import Iterator, Sequence

from engine.logprobs import read_logprobs
from engine.stream import PIECE
from fulcrum.v1 import inference_pb2 as pb
from service.tokenizer import Tokenizer


def token_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], records: bytes | bytearray, top: int
) -> list[pb.TokenLogprob]:
    """Messages for these tokens. `records` are theirs, `top` others in each; further ones are left."""
    token_bytes = tokenizer.token_bytes
    return [
        pb.TokenLogprob(
            token_id=token_id,
            logprob=own,
            bytes=token_bytes(token_id),
            top=[pb.TopLogprob(token_id=one, logprob=value, bytes=token_bytes(one)) for one, value in others],
        )
        for token_id, (own, others) in zip(ids, read_logprobs(records, top), strict=False)
    ]


def prompt_pieces(
    tokenizer: Tokenizer, prompt: Sequence[int], first: int, records: bytes | bytearray, top: int
) -> Iterator[pb.PromptLogprobs]:
    """Messages for the prompt's tokens from `first` on, as many as there are records."""
    size = PIECE * (4 + 8 * top)
    for at in range(0, len(records), size):
        tokens = token_logprobs(tokenizer, prompt[first : first + PIECE], records[at : at + size], top)
        yield pb.PromptLogprobs(offset=first, tokens=tokens)
        first += len(tokens)
