"""Compiles grammars: `python -m service.grammar_worker SOCKET`, started by `service.grammar`.

Standard input brings one frame with the vocabulary and the limits and then stays open: its end means that the parent
has gone. Each connection on the socket is one job, done in a child that is forked for it. So a limit that is passed
costs nothing but this child: SIGALRM ends it whatever it is doing, and memory beyond the limit cannot be had.
"""

import contextlib
import json
import os
import re
import resource
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine.frames import HEADER_BYTES, frame_length, to_frame
from engine.grammar import Vocabulary, tokenizer_info
from service.flat_schema import SchemaError
from service.json_schema import core_schema

if TYPE_CHECKING:
    import xgrammar

READY = b"ready\n"
# Of white space at one place, such as a line break and the indentation after it: small models lose themselves there.
_MAX_WHITESPACE = 16


class Setup(msgspec.Struct, array_like=True):
    """What the worker is told first.

    Args:
        seconds, memory_bytes: what one compilation may take (memory beside what the worker has itself).
        output_bytes: largest serialised grammar.
    """

    vocabulary: Vocabulary
    seconds: float
    memory_bytes: int
    output_bytes: int


class Job(msgspec.Struct, array_like=True):
    """One grammar.

    Args:
        kind: json_schema, json_object, regex, grammar (EBNF), choices, or structural_tag (XGrammar's JSON form).
        text: its source; of choices a JSON list of strings.
    """

    kind: str
    text: str


class Result(msgspec.Struct, array_like=True):
    """The serialised grammar, or why there is none."""

    grammar: bytes = b""
    error: str = ""


def compiled(compiler: "xgrammar.GrammarCompiler", job: Job) -> "xgrammar.CompiledGrammar":
    """Raises SchemaError, RuntimeError: what XGrammar says of a bad source."""
    from xgrammar import Grammar

    match job.kind:
        case "json_schema":
            schema = core_schema(job.text)
            source = _strict(Grammar.from_json_schema(schema, strict_mode=False, max_whitespace_cnt=_MAX_WHITESPACE))
        case "json_object":
            schema = '{"type": "object"}'
            source = Grammar.from_json_schema(schema, strict_mode=False, max_whitespace_cnt=_MAX_WHITESPACE)
        case "structural_tag":
            source = _strict(Grammar.from_structural_tag(json.dumps(_with_core_schemas(json.loads(job.text)))))
        case "regex":
            source = Grammar.from_regex(job.text)
        case "grammar":
            source = Grammar.from_ebnf(job.text)
        case "choices":
            source = Grammar.from_ebnf(alternatives(msgspec.json.decode(job.text, type=list[str])))
        case _:
            raise ValueError(f"unknown kind of grammar {job.kind!r}")
    return compiler.compile_grammar(source)


def _strict(grammar: "xgrammar.Grammar") -> "xgrammar.Grammar":
    """The grammar without control characters in strings of limited length, where XGrammar 0.2.9 lets them stand.

    Its class of their characters is all but quote, backslash, line feed and carriage return; in the serialised form:
    a class, of 9 numbers, negated, and the ranges. In the place of the last two ranges come U+0000 to U+001F.
    """
    text = grammar.serialize_json().replace("1,9,1,34,34,92,92,13,13,10,10", "1,9,1,34,34,92,92,0,31,0,31")
    return type(grammar).deserialize_json(text)


def _with_core_schemas(tag: Any) -> Any:
    """A structural tag, its JSON Schemas rewritten."""
    if isinstance(tag, list):
        return [_with_core_schemas(part) for part in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") == "json_schema":
        return tag | {"json_schema": json.loads(core_schema(json.dumps(tag["json_schema"])))}
    return {name: _with_core_schemas(part) for name, part in tag.items()}


def alternatives(choices: list[str]) -> str:
    """A grammar (EBNF) of just these texts."""
    quoted = ("".join(map(_quoted, choice)) for choice in choices)
    return "root ::= " + " | ".join(f'"{text}"' for text in quoted)


def _quoted(char: str) -> str:
    return char if re.match(r"[A-Za-z0-9 _.,-]", char) else f"\\U{ord(char):08X}"


def main() -> int:
    """Serves until standard input ends. Returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave nothing to wait for
    import xgrammar  # takes seconds

    reply = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints goes to standard error
    lifeline = open(0, "rb", buffering=0)  # noqa: SIM115, as long as the process
    setup = msgspec.msgpack.decode(_read_frame(lifeline.read), type=Setup)
    info = tokenizer_info(setup.vocabulary)
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(sys.argv[1])
        Path(sys.argv[1]).chmod(0o600)
        listener.listen(64)
        os.write(reply, READY)
        os.close(reply)
        selector.register(listener, selectors.EVENT_READ)
        selector.register(lifeline, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not listener:
                    return 0
                connection, _ = listener.accept()
                if os.fork() == 0:
                    listener.close()
                    _work(connection, xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False), setup)
                connection.close()


def _work(connection: socket.socket, compiler: "xgrammar.GrammarCompiler", setup: Setup) -> None:
    """In the child: does one job within the limits, and never returns."""
    try:
        signal.setitimer(signal.ITIMER_REAL, setup.seconds)  # the default action of SIGALRM ends the process
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = in_use + setup.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        job = msgspec.msgpack.decode(_read_frame(connection.recv), type=Job)
        connection.sendall(to_frame(msgspec.msgpack.encode(_result(compiler, job, setup.output_bytes))))
    finally:
        os._exit(0)


def _result(compiler: "xgrammar.GrammarCompiler", job: Job, output_bytes: int) -> Result:
    try:
        data = compiled(compiler, job).serialize_json().encode()
    except (SchemaError, RuntimeError, ValueError) as error:
        return Result(error=_message(error))
    except MemoryError:
        return Result(error="its compilation takes more memory than it may")
    if len(data) > output_bytes:
        return Result(error=f"its compiled form has {len(data)} bytes, more than the {output_bytes} that it may")
    return Result(grammar=data)


def _message(error: Exception) -> str:
    """XGrammar's messages without time and place in its source."""
    text = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error).strip())
    return "its compilation takes more memory than it may" if "bad_alloc" in text else text or "it cannot be compiled"


def _read_frame(read: Callable[[int], bytes | None]) -> bytes:
    """Raises EOFError when it ends before the frame does."""

    def exactly(count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = read(min(count - len(data), 1 << 20))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    return exactly(frame_length(exactly(HEADER_BYTES)))


if __name__ == "__main__":
    with contextlib.suppress(EOFError):
        sys.exit(main())
