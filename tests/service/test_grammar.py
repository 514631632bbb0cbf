"""The compiler's process: its limits, its cache, what its grammars allow; then the service with a scripted engine."""

import asyncio
import errno
import fcntl
import json
import os
import re
import signal
import socket
import sys
import termios
import time
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
import xgrammar

from engine.grammar import GrammarError, Grammars, Vocabulary, tokenizer_info
from engine.request import FinishReason, RejectReason, RequestRejected
from fulcrum.v1 import inference_pb2 as pb
from service import grammar, grammar_worker
from service.errors import ApiError
from service.grammar import GrammarCompiler
from service.grammar_worker import Constraint, alternatives
from service.tokenizer import Tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

EOS = 257
SECONDS = 3.0
# Its automaton has millions of states.
HOSTILE = r"(.{0,3000}){0,3000}[^a]{1,3000}(\w{2,900}|\d{3,800}){2,700}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def compiler(byte_model):
    compiler = GrammarCompiler(Tokenizer.load(byte_model), 300, [EOS], seconds=SECONDS)
    yield compiler
    await compiler.close()


def matched(compiler, compiled, text):
    """Whether the core's matcher goes along with the text to its end."""
    grammars = Grammars()
    grammars.load(compiled.key, compiled.data, compiler.vocabulary)
    matcher = grammars.matcher(compiled.key)
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(EOS) and matcher.terminated


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        ("json_schema", '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}',
         ['{"a": 1}', '{\n "a":1}'], ["{}", "1"]),
        ("json_object", "", ["{}", '{"a":[1,{}]}'], ["[]", "1", '{"a"}', '{"a":1}x']),
        ("regex", r"\d{2,3}|x+", ["12", "123", "xxx"], ["1", "1234", "", "12x"]),
        ("regex", r"^a|[$^]\$$", ["a", "^$", "$$"], ["", "$", "a$", "^"]),
        ("regex", r"[.]é.\x61a\\x61", [".éxaa\\x61"], [".é\naa\\x61", "xéxaa\\x61"]),
        ("regex", r"\{4294967297}[{4294967297}]", ["{4294967297}{"], ["{", "{4294967297}"]),
        ("grammar", 'root ::= "a" root "b" | "-"', ["-", "a-b", "aa-bb"], ["a-", "", "ab"]),
        ("grammar", 'root ::= "\\"{4294967297}" [{4294967297}]{2} # {4294967297}',
         ['"{4294967297}42'], ['"{4294967297}4']),
        ("choices", '["yes","a\\"b\\\\","ü\\n😀","]"]', ["yes", 'a"b\\', "ü\n😀", "]"], ["no", "ye", "yesyes", "ü"]),
    ],
)  # fmt: skip
async def test_each_kind_allows_what_it_says(compiler, kind, source, good, bad):
    compiled = await compiler.compile(Constraint(kind, source))
    assert [text for text in good if not matched(compiler, compiled, text)] == []
    assert [text for text in bad if matched(compiler, compiled, text)] == []


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("json_schema", "{", "not valid JSON"),
        ("json_schema", '{"uniqueItems": true}', "/uniqueItems: uniqueItems is not served"),
        ("json_schema", '{"pattern": "("}', "/pattern"),
        ("json_schema", '{"maximum": 1e999}', "1e999 is not in the range of numbers"),
        ("regex", "(", "parentheses do not match"),
        ("regex", "(?=a)", "Lookahead"),
        ("regex", "^a|a$b", "of anchors only ^ and $ are served, at the ends"),
        ("regex", "(a$)b", "of anchors"),
        ("regex", r"\Aa\Z", "of anchors"),
        ("regex", "[^]]+", r"a ] that a class begins with is to be written \]"),
        ("regex", "a[]]", "a ] that a class begins with"),
        ("regex", "a{4294967297}", "repeated more than 2147483647 times"),
        ("regex", r"\{a{0,99999999999}", "repeated more than"),
        ("grammar", 'root ::= "a"{4294967297}', "repeated more than"),
        ("grammar", 'root ::= [{"] ("a" "]"){ 1 , 4294967297 }', "repeated more than"),
        ("grammar", "root ::= missing", "missing"),
        ("grammar", 'start ::= "a"', "root"),
    ],
)
async def test_a_bad_one_is_refused_with_the_compilers_words(compiler, kind, source, words):
    with pytest.raises(ApiError) as caught:
        await compiler.compile(Constraint(kind, source))
    error = caught.value
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_GRAMMAR")
    assert [violation.field for violation in error.violations] == [kind]
    assert words in error.message
    assert "cpp" not in error.message


async def test_a_hostile_one_ends_at_the_limit_and_holds_up_nobody(compiler):
    began = time.monotonic()
    hostile = asyncio.create_task(compiler.compile(Constraint("regex", HOSTILE)))
    await compiler.compile(Constraint("regex", "quick"))
    assert not hostile.done()
    with pytest.raises(ApiError, match="longer than the 3 s"):
        await hostile
    assert SECONDS <= time.monotonic() - began < SECONDS + 5
    again = time.monotonic()
    with pytest.raises(ApiError, match="longer than the 3 s"):
        await compiler.compile(Constraint("regex", HOSTILE))
    assert time.monotonic() - again < 1  # it is known by now


async def test_one_that_takes_too_much_memory_is_refused(byte_model, monkeypatch):
    monkeypatch.setattr("service.grammar._MEMORY_BYTES", 48 << 20)
    compiler = GrammarCompiler(Tokenizer.load(byte_model), 300, [EOS], seconds=60.0)
    try:
        with pytest.raises(ApiError, match="more memory than it may"):
            await compiler.compile(Constraint("regex", HOSTILE))
        assert (await compiler.compile(Constraint("regex", "quick"))).data
        resident = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{compiler._worker[0].pid}/status").read_text())
        assert 100e6 < 1024 * int(resident[1]) < 400e6, "about 300 MB"
    finally:
        await compiler.close()


async def test_equal_ones_are_compiled_once_and_kept(compiler, monkeypatch):
    jobs = []
    asked = grammar._asked

    async def counted(control, message, seconds):
        jobs.append(message)
        return await asked(control, message, seconds)

    monkeypatch.setattr(grammar, "_asked", counted)
    source = Constraint("regex", "once[0-9]")
    abandoned = asyncio.create_task(compiler.compile(source))
    results = asyncio.gather(*(compiler.compile(source) for _ in range(5)))
    await asyncio.sleep(0)
    abandoned.cancel()
    first, *others = await results
    assert all(other == first for other in others)
    assert await compiler.compile(source) == first
    assert len(jobs) == 1


async def test_what_waits_for_a_process_that_dies_is_compiled_by_the_next(compiler):
    await compiler.compile(Constraint("regex", "stopped"))
    process, control = compiler._worker
    os.kill(process.pid, signal.SIGSTOP)
    waiting = asyncio.create_task(compiler.compile(Constraint("regex", "waits[0-9]")))
    async with asyncio.timeout(10):
        while not any(fcntl.ioctl(control, termios.TIOCOUTQ, bytes(4))):  # until it lies there
            await asyncio.sleep(0.01)
    process.kill()
    assert (await waiting).data
    assert compiler._worker[0] is not process


async def test_a_process_that_dies_while_it_starts_has_one_successor_and_then_a_retry_may_help(byte_model):
    compiler = GrammarCompiler(Tokenizer.load(byte_model), 300, [EOS], seconds=SECONDS)
    source, worker = Constraint("regex", "starts"), None

    async def killed_while_it_starts():
        nonlocal worker
        async with asyncio.timeout(10):
            while compiler._worker is worker:
                await asyncio.sleep(0.01)
        worker = compiler._worker
        worker[0].kill()

    try:
        waiting = asyncio.create_task(compiler.compile(source))
        await killed_while_it_starts()
        await killed_while_it_starts()
        with pytest.raises(ApiError) as caught:
            await waiting
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, "GRAMMAR_COMPILER_DEAD")
        assert caught.value.retry_after
        waiting = asyncio.create_task(compiler.compile(source))
        await killed_while_it_starts()
        assert (await waiting).data
    finally:
        await compiler.close()


async def test_one_that_finds_no_free_file_fails_and_holds_up_none(compiler, monkeypatch):
    """The process lives: to wait for its end were to wait for ever, and in the place of others."""
    await compiler.compile(Constraint("choices", '["started"]'))

    def no_file():
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", no_file)
        for number in range(5):
            with pytest.raises(OSError, match="Too many open files"):
                await asyncio.wait_for(compiler.compile(Constraint("choices", f'["{number}"]')), 10)
    assert matched(compiler, await compiler.compile(Constraint("choices", '["0"]')), "0")


async def test_grammars_are_of_one_vocabulary_and_make_room(compiler):
    first = await compiler.compile(Constraint("regex", "first"))
    second = await compiler.compile(Constraint("regex", "second"))
    grammars = Grammars(max_bytes=1)
    with pytest.raises(GrammarError, match="cannot be read"):
        grammars.load("x", b"{}", compiler.vocabulary)
    grammars.load(first.key, first.data, compiler.vocabulary)
    grammars.load(second.key, second.data, compiler.vocabulary)
    assert (first.key in grammars, second.key in grammars) == (False, True)
    with pytest.raises(RequestRejected, match="does not hold"):
        grammars.matcher(first.key)
    few = Grammars(max_held=1)
    for compiled in (first, second):
        few.load(compiled.key, compiled.data, compiler.vocabulary)
    assert (first.key in few, second.key in few) == (False, True)
    other = GrammarCompiler(compiler._tokenizer, 299, [EOS], seconds=1.0)
    with pytest.raises(GrammarError, match="another vocabulary"):
        grammars.load(first.key, first.data, other.vocabulary)


async def test_grammars_take_the_room_of_their_serialised_form(compiler):
    """As they do in the process: 56 MB of 67 with 200 properties, of which XGrammar says that they are 1.5."""
    schemas = ({"properties": {f"{name}{number}": {} for number in range(30)}} for name in "ab")
    compiled = [await compiler.compile(Constraint("json_schema", json.dumps(schema))) for schema in schemas]
    size = sum(len(each.data) for each in compiled)
    for missing, held in ((0, [True, True]), (1, [False, True])):
        grammars = Grammars(max_bytes=size - missing)
        for each in compiled:
            grammars.load(each.key, each.data, compiler.vocabulary)
        assert [each.key in grammars for each in compiled] == held


async def test_masks_have_a_bit_for_each_token_and_bar_stops_while_there_is_more(compiler):
    compiled = await compiler.compile(Constraint("regex", "ab*"))
    grammars = Grammars()
    grammars.load(compiled.key, compiled.data, compiler.vocabulary)
    matcher = grammars.matcher(compiled.key)

    def allowed(barred=()):
        bits = matcher.mask(barred)
        assert len(bits) == 40  # 300 tokens in whole words of 32
        return [i for i in range(320) if bits[i // 8] >> i % 8 & 1]

    assert allowed() == [ord("a")]
    assert not matcher.accept(ord("b"))
    assert matcher.accept(ord("a"))
    assert allowed() == [ord("b"), EOS]
    assert allowed([EOS]) == [ord("b")]
    assert allowed([EOS, ord("b")]) == [ord("b"), EOS]  # a text that can only end may end
    assert matcher.accept(ord("b"))
    assert matcher.accept(EOS)
    matcher.rollback(3)  # also from behind the end
    assert not matcher.terminated
    assert allowed() == [ord("a")]
    assert matcher.accept(ord("a"))
    assert matcher.accept(EOS)
    assert matcher.terminated


async def test_a_matcher_that_was_not_asked_yet_holds_nothing(compiler, monkeypatch):
    """Of what waits there may be millions, and to make one of XGrammar's takes up to milliseconds."""
    compiled = await compiler.compile(Constraint("regex", "ab*"))
    grammars = Grammars()
    grammars.load(compiled.key, compiled.data, compiler.vocabulary)
    with monkeypatch.context() as patch:
        patch.delattr(xgrammar, "GrammarMatcher")
        matcher = grammars.matcher(compiled.key)
    assert matcher.accept(ord("a"))


async def test_a_grammar_that_takes_too_long_to_follow_is_followed_no_further(compiler):
    compiled = await compiler.compile(Constraint("regex", "((a|b|c|d){1,1000}e?){1,1000}"))
    grammars = Grammars()
    grammars.load(compiled.key, compiled.data, compiler.vocabulary)
    matcher, another = grammars.matcher(compiled.key), grammars.matcher(compiled.key)
    began = time.monotonic()
    followed = 0
    while any(matcher.mask() or b"x"):
        assert matcher.accept(b"abcd"[followed % 4])
        followed += 1
    assert 10 < followed < 10_000
    assert time.monotonic() - began < 20
    assert matcher.seconds() > 0.5
    assert not matcher.seconds(), "told once"
    assert not any(another.mask())
    with pytest.raises(RequestRejected, match="too long"):
        grammars.matcher(compiled.key)


def matcher_of(regex, *long):
    """A matcher with a vocabulary of all bytes, of these longer tokens from 256 on, and of one that ends the text."""
    vocabulary = Vocabulary((*(bytes([byte]) for byte in range(256)), *long, b""), (256 + len(long),))
    xgrammars = xgrammar.GrammarCompiler(tokenizer_info(vocabulary), max_threads=1)
    grammars = Grammars()
    data = grammar_worker.compiled(xgrammars, Constraint("regex", regex)).serialize_json().encode()
    grammars.load("", data, vocabulary)
    return grammars.matcher("")


async def test_a_long_token_ends_with_its_grammar_s_time():
    """Whole, one of 128 bytes takes 40 s."""
    matcher = matcher_of("((a|b|c|d|ab|abc|abcd|a*|b*)*){1,1000}", b"a" * 128)
    assert matcher.mask()[256 // 8] & 1
    assert matcher.accept(256)
    assert matcher.seconds() < 10
    assert not any(matcher.mask())


async def test_a_long_token_is_as_its_bytes():
    text, wrong = "aé😀".encode() * 9, "aé😀".encode() * 8 + b"ab" * 9
    matcher, bytewise = [matcher_of("(aé😀)*b", text, wrong) for _ in range(2)]
    first = matcher.mask()
    assert not matcher.accept(257)
    assert matcher.mask() == first
    assert matcher.accept(256)
    assert all(map(bytewise.accept, text + b"a"))
    assert matcher.accept(ord("a"))
    assert matcher.mask() == bytewise.mask() != first
    matcher.rollback(0)
    assert matcher.mask() == bytewise.mask()
    matcher.rollback(2)
    assert matcher.mask() == first
    assert matcher.accept(256)
    assert matcher.accept(ord("b"))
    assert matcher.accept(258)
    assert matcher.terminated


async def test_grammars_that_live_requests_follow_are_bounded_also_those_that_are_crowded_out(compiler, monkeypatch):
    """One of a hundred properties takes 16 MB for as long as somebody follows it."""
    first, second, third = [await compiler.compile(Constraint("regex", text)) for text in "abc"]
    monkeypatch.setattr("engine.grammar.usable_memory", lambda: 8 * len(first.data + second.data))
    grammars = Grammars(max_held=1)

    def matcher(compiled):
        grammars.load(compiled.key, compiled.data, compiler.vocabulary)
        return grammars.matcher(compiled.key)

    followed = [matcher(first), matcher(first), matcher(second)]
    with pytest.raises(RequestRejected) as caught:
        matcher(third)
    assert caught.value.reason is RejectReason.QUEUE_FULL
    followed.append(matcher(second))  # which is there, though it was crowded out
    del followed[0]
    with pytest.raises(RequestRejected):
        matcher(third)
    del followed[0]
    assert matcher(third).accept(ord("c"))
    followed.clear()
    monkeypatch.setattr(grammars, "_max_used", 1)
    assert matcher(third).accept(ord("c")), "alone, one of any size may be followed"


async def test_what_was_loaded_stays_though_it_was_known_and_whoever_followed_it_ends(compiler):
    first, second = [await compiler.compile(Constraint("regex", text)) for text in "ab"]
    grammars = Grammars(max_held=1)
    grammars.load(first.key, first.data, compiler.vocabulary)
    follower = grammars.matcher(first.key)
    for compiled in (second, first):  # the first is crowded out and loaded again
        grammars.load(compiled.key, compiled.data, compiler.vocabulary)
    del follower
    assert grammars.matcher(first.key).accept(ord("a"))


async def test_texts_of_a_grammar_that_take_much_memory_end_until_the_others_have_room(compiler, monkeypatch):
    """With 3,000 ways open XGrammar keeps 160 KB of each byte, and 0.3 of a string's."""
    monkeypatch.setattr("engine.grammar._KEPT_SECONDS", 0.04)
    grammars = Grammars()

    async def texts(kind, text, count):
        compiled = await compiler.compile(Constraint(kind, text))
        grammars.load(compiled.key, compiled.data, compiler.vocabulary)
        return [grammars.matcher(compiled.key) for _ in range(count)]

    def goes_on(matcher):
        return all(any(matcher.mask() or b"x") and matcher.accept(ord("a")) for _ in range(10))

    ways = "|".join(f"[a-z]*{number}" for number in range(3000))
    first, second = await texts("regex", ways, 2)
    while goes_on(first):
        pass
    assert goes_on(second)
    while goes_on(second):
        pass
    assert all(map(goes_on, await texts("regex", ways, 1)))
    (common,) = await texts("regex", "[a-z]*", 1)
    assert all(goes_on(common) for _ in range(500))


async def test_grammars_of_much_memory_leave_room_for_each_other_and_for_the_common(compiler, monkeypatch):
    """One alone has half of it, four a fifth each."""
    monkeypatch.setattr("engine.grammar._KEPT_SECONDS", 0.1)
    grammars = Grammars()

    async def matcher(text):
        compiled = await compiler.compile(Constraint("regex", text))
        grammars.load(compiled.key, compiled.data, compiler.vocabulary)
        return grammars.matcher(compiled.key)

    def goes_on(matcher):
        return any(matcher.mask() or b"x") and matcher.accept(ord("a"))

    alone, *four = [await matcher("|".join(f"[a-z]*{number}{end}" for number in range(3000))) for end in "vwxyz"]
    common = await matcher("[a-z]*")
    of_one = sum(iter(lambda: goes_on(alone), False))
    live, of_four = four, 0
    while len(live) == 4:
        live = [each for each in live if goes_on(each)]
        of_four += len(live)
        assert goes_on(common)
    assert of_one < of_four < 2.5 * of_one


async def test_the_process_ends_with_its_owner(compiler):  # the last of these tests that needs it
    await compiler.compile(Constraint("regex", "a"))
    pid = compiler._worker[0].pid
    await compiler.close()
    assert not os.path.exists(f"/proc/{pid}")


async def test_a_serving_process_imports_the_library_only_for_a_grammar():
    code = "import sys, service.server, engine.core_server, engine.build; loaded = {*sys.modules}"
    code += "; print({'xgrammar', 'transformers'} & loaded)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert (await process.communicate())[0] == b"set()\n"


async def test_choices_are_quoted():
    assert alternatives(["a b", '"']) == 'root ::= "a b" | "\\U00000022"'


# ------------------------------------------------------------------------------------------------- through the service


def request(**fields):
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), **fields)


async def test_the_core_gets_the_grammar_before_the_request_that_names_it(make_core, serving, details):
    core = make_core()
    core.reply = lambda _: [(0, [ord("b"), EOS], FinishReason.EOS)]
    async with serving(core) as server:
        events = [event async for event in server.stub.Generate(request(regex="b"))]
        assert events[-2].finished.reason == pb.FINISH_REASON_STOP
        ((key, _, vocabulary),) = core.grammars
        assert core.requests[0].grammar == key
        assert (len(vocabulary.tokens), vocabulary.stop_token_ids) == (258, (EOS,))
        assert vocabulary.tokens[97] == b"a"
        assert vocabulary.tokens[256] == b""
        # One that the core has forgotten is given again.
        refusals = [RequestRejected(RejectReason.UNKNOWN_GRAMMAR, "gone", "constraint")]
        submit = core.submit

        async def forgetful(job):
            if refusals:
                raise refusals.pop()
            return await submit(job)

        core.submit = forgetful
        slow = RequestRejected(RejectReason.INVALID, "following it takes too long", "constraint")
        assert [event async for event in server.stub.Generate(request(regex="b"))]
        assert len(core.grammars) == 3
        refusals.append(slow)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.stub.Generate(request(regex="b")).read()
        error = details(caught.value)
        assert (error.reason, error.fields) == ("INVALID_GRAMMAR", ["regex"])


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"json_schema": ""}, "json_schema", "empty"),
        ({"json_schema": json.dumps({"title": "x" * 65536})}, "json_schema", "65536"),
        ({"json_object": False}, "json_object", "true"),
        ({"choices": pb.Choices()}, "choices", "1 to 1024"),
        ({"choices": pb.Choices(choices=["a", ""])}, "choices", "empty"),
        ({"choices": pb.Choices(choices=["a"] * 1025)}, "choices", "1025"),
        ({"regex": "a" * 65537}, "regex", "65537 bytes"),
    ],
)
async def test_what_is_too_large_or_empty_is_refused_at_once(make_core, serving, details, fields, field, words):
    async with serving(make_core()) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.stub.Generate(request(**fields)).read()
    error = details(caught.value)
    assert (error.reason, error.fields) == ("INVALID_PARAMETER", [field])
    assert words in error.message


async def test_a_model_without_an_end_token_is_not_constrained(make_core, serving, details):
    async with serving(make_core(eos_token_ids=[])) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.stub.Generate(request(json_object=True)).read()
    assert details(caught.value).reason == "INVALID_GRAMMAR"
