"""Compiles grammars: `python -m service.grammar_worker`, started by `service.grammar`.

Standard input is a socket on which sockets come: one with the vocabulary and the limits, then one for each job, which
is done in a child that is forked for it. So a limit that is passed costs nothing but this child: SIGALRM ends it
whatever it is doing, and memory beyond the limit cannot be had. The end of standard input means that the parent has
gone.
"""

import json
import os
import re
import resource
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from engine.grammar import Vocabulary, tokenizer_info
from service.flat_schema import SchemaError
from service.json_schema import core_schema
from service.patterns import PatternError, checked_grammar, of_a_text

if TYPE_CHECKING:
    import xgrammar

BEGUN = b"\0"  # before every answer
# Of white space at one place, such as a line break and the indentation after it: small models lose themselves there.
MAX_WHITESPACE = 16


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


class Constraint(NamedTuple):
    """What a text must follow.

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


def compiled(compiler: "xgrammar.GrammarCompiler", job: Constraint) -> "xgrammar.CompiledGrammar":
    """Raises SchemaError, PatternError, RuntimeError: what XGrammar says of a bad source."""
    from xgrammar import Grammar

    match job.kind:
        case "json_schema":
            schema = json.dumps(_core(job.text))
            source = _strict(Grammar.from_json_schema(schema, strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE))
        case "json_object":
            schema = '{"type": "object"}'
            source = Grammar.from_json_schema(schema, strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE)
        case "structural_tag":
            source = _strict(Grammar.from_structural_tag(json.dumps(_rewritten(json.loads(job.text)))))
        case "regex":
            source = Grammar.from_regex(of_a_text(job.text))
        case "grammar":
            source = Grammar.from_ebnf(checked_grammar(job.text))
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


def _core(text: str) -> Any:
    """The schema in the core language. Raises SchemaError, also for a pattern that XGrammar 0.2.9 does not hold to what
    a JSON string may have: where nothing is left of a part of it, as of [\\\\], it lets quotes stand.
    """
    from xgrammar import Grammar

    schema = json.loads(core_schema(text))
    for pattern in set(_patterns(schema)):
        alone = Grammar.from_json_schema(json.dumps({"type": "string", "pattern": pattern}), strict_mode=False)
        if "json_string=true" not in str(alone):
            raise SchemaError("", f"the pattern {pattern!r:.80} is not served")
    return schema


def _patterns(node: Any) -> Iterator[str]:
    """Those in a node of the core language."""
    if isinstance(node, list):
        for part in node:
            yield from _patterns(part)
    elif isinstance(node, dict):
        yield from (node["pattern"],) if "pattern" in node else ()
        yield from node.get("patternProperties", ())
        for word in ("properties", "patternProperties", "$defs"):
            yield from _patterns(list(node.get(word, {}).values()))
        yield from _patterns([node.get(word) for word in ("anyOf", "items", "prefixItems", "additionalProperties")])


def _rewritten(tag: Any) -> Any:
    """A structural tag, its JSON Schemas and patterns rewritten."""
    if isinstance(tag, list):
        return [_rewritten(part) for part in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") == "json_schema":
        return tag | {"json_schema": _core(json.dumps(tag["json_schema"]))}
    if tag.get("type") == "regex":
        return tag | {"pattern": of_a_text(tag["pattern"])}
    return {name: _rewritten(part) for name, part in tag.items()}


def alternatives(choices: list[str]) -> str:
    """A grammar (EBNF) of just these texts."""
    quoted = ("".join(map(_quoted, choice)) for choice in choices)
    return "root ::= " + " | ".join(f'"{text}"' for text in quoted)


def _quoted(char: str) -> str:
    return char if re.match(r"[A-Za-z0-9 _.,-]", char) else f"\\U{ord(char):08X}"


def main() -> None:
    """Serves until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave nothing to wait for
    os.dup2(2, 1)  # whatever a library prints goes to standard error
    import xgrammar  # takes seconds

    control = socket.socket(fileno=0)
    if (first := _next(control)) is None:
        return
    with first:
        setup = msgspec.msgpack.decode(_message(first), type=Setup)
        info = tokenizer_info(setup.vocabulary)
        first.sendall(BEGUN)
    while (connection := _next(control)) is not None:
        if os.fork() == 0:
            control.close()  # lest it seem to live when it has died
            _work(connection, xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False), setup)
        connection.close()


def _next(control: socket.socket) -> socket.socket | None:
    """The next socket that comes; None at the end."""
    _, files, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=files[0]) if files else None


def _message(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 20), b""))


def _work(connection: socket.socket, compiler: "xgrammar.GrammarCompiler", setup: Setup) -> None:
    """In the child: does one job within the limits, and never returns."""
    try:
        connection.sendall(BEGUN)
        signal.setitimer(signal.ITIMER_REAL, setup.seconds)  # the default action of SIGALRM ends the process
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = in_use + setup.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        job = msgspec.msgpack.decode(_message(connection), type=Constraint)
        connection.sendall(msgspec.msgpack.encode(_result(compiler, job, setup.output_bytes)))
    finally:
        os._exit(0)


def _result(compiler: "xgrammar.GrammarCompiler", job: Constraint, output_bytes: int) -> Result:
    try:
        data = compiled(compiler, job).serialize_json().encode()
    except (SchemaError, PatternError, RuntimeError, ValueError) as error:
        return Result(error=_reason(error))
    except MemoryError:
        return Result(error="its compilation takes more memory than it may")
    if len(data) > output_bytes:
        return Result(error=f"its compiled form has {len(data)} bytes, more than the {output_bytes} that it may")
    return Result(grammar=data)


def _reason(error: Exception) -> str:
    """XGrammar's messages without time and place in its source."""
    text = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error).strip())
    return "its compilation takes more memory than it may" if "bad_alloc" in text else text or "it cannot be compiled"


if __name__ == "__main__":
    main()
