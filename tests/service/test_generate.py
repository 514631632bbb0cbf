"""The events of Generate, over a real server and a scripted engine whose token ids are bytes."""

import asyncio
import gc
import time

import grpc
import pytest
import tokenizers
from tokenizers import decoders

from engine.request import FinishReason
from fulcrum.v1 import inference_pb2 as pb
from service.choice import Choice

EOS = 257


def prompt(text="hello", **fields):
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=text.encode()), **fields)


async def collect(call):
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


def kinds(events):
    return [event.WhichOneof("event") for event in events]


def text_of(events, index=0):
    return "".join(e.delta.text for e in events if e.HasField("delta") and e.delta.index == index)


def ids_of(events, index=0):
    return [i for e in events if e.HasField("delta") and e.delta.index == index for i in e.delta.token_ids]


def finished(events):
    return {e.finished.index: e.finished for e in events if e.HasField("finished")}


def bytewise(*texts, finish=FinishReason.EOS):
    """One token a message, each index in turn, as a batch decodes them."""
    sequences = [[*text.encode(), *([EOS] if finish is FinishReason.EOS else [])] for text in texts]
    script = []
    for position in range(max(map(len, sequences))):
        for index, ids in enumerate(sequences):
            if position < len(ids):
                script.append((index, [ids[position]], finish if position + 1 == len(ids) else None))
    return lambda request: script


async def test_events_come_in_order(make_core, serving):
    core = make_core()
    async with serving(core) as server:
        call = server.stub.Generate(prompt("hello", request_id="r-1", output=pb.OutputOptions(token_ids=True)))
        accepted = await call.read()
        assert accepted.accepted == pb.Accepted(request_id="r-1", model="bytes")
        core.start("r-1", cached_tokens=3)
        assert (await call.read()).started == pb.Started(prompt_tokens=5, cached_tokens=3)
        for byte in b"hi":
            core.emit("r-1", 0, [byte])
            assert (await call.read()).delta == pb.Delta(index=0, text=chr(byte), token_ids=[byte])
        core.emit("r-1", 0, [EOS], FinishReason.EOS)
        assert (await call.read()).delta == pb.Delta(index=0, token_ids=[EOS])
        end = (await call.read()).finished
        assert (end.reason, end.eos_token_id, end.completion_tokens) == (pb.FINISH_REASON_STOP, EOS, 3)
        usage = (await call.read()).usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (5, 3, 3)
        assert usage.queue_seconds > 0
        assert usage.prefill_seconds > 0
        assert usage.decode_seconds > 0
        assert await collect(call) == []
        assert core.aborted == []


async def test_choices_are_made_when_their_first_tokens_come(make_core, serving):
    """Of requests that wait for the engine there are millions."""
    core = make_core()
    async with serving(core) as server:
        call = server.stub.Generate(prompt("hello", request_id="several", n=3))
        await call.read()
        core.start("several")
        await call.read()
        core.emit("several", 1, [*b"a"])
        assert (await call.read()).delta == pb.Delta(index=1, text="a")
        made = [one for one in gc.get_objects() if type(one) is Choice and one.plan.job.request_id == "several"]
        assert [choice.index for choice in made] == [1]


async def test_an_id_is_minted_and_the_alias_is_echoed(make_core, serving):
    core = make_core()
    core.reply = bytewise("x")
    async with serving(core) as server:
        ids = set()
        for _ in range(2):
            events = await collect(server.stub.Generate(prompt(model="bytes-alias")))
            assert events[0].accepted.model == "bytes-alias"
            ids.add(events[0].accepted.request_id)
        assert len(ids) == 2
        assert "" not in ids
        assert {request.request_id for request in core.requests} == ids


async def test_text_prompt_and_chat_reach_the_engine_as_token_ids(make_core, serving):
    core = make_core()
    core.reply = bytewise("x")
    async with serving(core) as server:
        await collect(server.stub.Generate(pb.GenerateRequest(text="aé")))
        assert core.requests[-1].prompt == (97, 0xC3, 0xA9)
        message = pb.ChatMessage(role="user", content=[pb.ContentPart(text="hi")])
        await collect(server.stub.Generate(pb.GenerateRequest(chat=pb.Chat(messages=[message]))))
        rendered = (256, *b"user\nhi", 257, *b"\n", 256, *b"assistant\n")
        assert core.requests[-1].prompt == rendered
        chat = pb.Chat(messages=[message], add_generation_prompt=False, template_kwargs_json='{"extra": "!"}')
        await collect(server.stub.Generate(pb.GenerateRequest(chat=chat)))
        assert core.requests[-1].prompt == (256, *b"user\nhi", 257, *b"\n!")


async def test_silent_fields_take_the_models_defaults_and_the_rest_of_the_window(make_core, serving):
    core = make_core(max_model_len=100)
    core.reply = bytewise("x")
    async with serving(core) as server:
        await collect(server.stub.Generate(prompt("12345")))
        params = core.requests[-1].params
        # generation_config.json of the model says temperature 0.5 and top_k 7.
        assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 7, 1.0, 0.0)
        assert (params.max_tokens, params.min_tokens, params.n, params.seed) == (95, 0, 1, None)
        explicit = pb.SamplingParams(temperature=0, top_k=0, seed=0, logit_bias={5: -100.0})
        stopping = pb.StoppingCriteria(max_tokens=95, min_tokens=2, stop_token_ids=[9, 9], ignore_eos=True)
        await collect(server.stub.Generate(prompt("12345", sampling=explicit, stopping=stopping)))
        params = core.requests[-1].params
        assert (params.temperature, params.top_k, params.seed, params.logit_bias) == (0.0, 0, 0, {5: -100.0})
        assert (params.max_tokens, params.min_tokens, params.stop_token_ids, params.ignore_eos) == (95, 2, (9,), True)


async def test_priority_salt_bypass_and_speculative_reach_the_engine(make_core, serving):
    core = make_core()
    core.reply = bytewise("x")
    async with serving(core) as server:
        before = time.monotonic()
        cache = pb.CacheOptions(bypass=True, salt="s")
        await collect(server.stub.Generate(prompt(priority=5, cache=cache, speculative=False)))
        request = core.requests[-1]
        assert (request.priority, request.salt, request.bypass_cache, request.speculative) == (5, "s", True, False)
        assert before <= request.arrival <= time.monotonic()


async def test_characters_split_over_tokens_come_whole(make_core, serving):
    text = "naïve 日本語 👩‍👩‍👧 ok"
    core = make_core()
    core.reply = bytewise(text)
    async with serving(core) as server:
        events = await collect(server.stub.Generate(prompt(output=pb.OutputOptions(token_ids=True))))
        assert text_of(events) == text
        assert "\ufffd" not in text_of(events)
        assert ids_of(events) == [*text.encode(), EOS]


async def test_an_unfinished_character_is_flushed_at_the_end(make_core, serving):
    core = make_core()
    core.reply = lambda request: [(0, list("é".encode()[:1]), FinishReason.LENGTH)]
    async with serving(core) as server:
        events = await collect(server.stub.Generate(prompt()))
        assert text_of(events) == "\ufffd"
        assert finished(events)[0].reason == pb.FINISH_REASON_LENGTH


@pytest.mark.parametrize(
    ("include", "text"),
    [(False, "one "), (True, "one END")],
)
async def test_a_stop_string_ends_the_sequence(make_core, serving, include, text):
    core = make_core()
    async with serving(core) as server:
        stopping = pb.StoppingCriteria(stop=["XX", "END"], include_stop=include)
        output = pb.OutputOptions(token_ids=True)
        call = server.stub.Generate(prompt(request_id="r", stopping=stopping, output=output))
        await call.read()
        core.start("r")
        # The engine is a few tokens ahead when the stop string is found.
        core.emit("r", 0, list(b"one END and more"))
        events = await collect(call)
        assert text_of(events) == text
        assert ids_of(events) == list(b"one END")
        end = finished(events)[0]
        assert (end.reason, end.WhichOneof("matched"), end.stop, end.completion_tokens) == (1, "stop", "END", 7)
        assert events[-1].usage.completion_tokens == 7
        assert core.ended == [("r", 0)]
        assert core.aborted == []


async def test_held_back_text_is_flushed_when_no_stop_came_of_it(make_core, serving):
    core = make_core()
    core.reply = bytewise("say EN")
    async with serving(core) as server:
        events = await collect(server.stub.Generate(prompt(stopping=pb.StoppingCriteria(stop=["END"]))))
        assert text_of(events) == "say EN"
        assert finished(events)[0].WhichOneof("matched") == "eos_token_id"


async def test_a_stop_string_on_the_last_token_wins_over_length(make_core, serving):
    core = make_core()
    core.reply = bytewise("ab", finish=FinishReason.LENGTH)
    async with serving(core) as server:
        stopping = pb.StoppingCriteria(stop=["b"], max_tokens=2)
        events = await collect(server.stub.Generate(prompt(stopping=stopping)))
        assert (text_of(events), finished(events)[0].stop, finished(events)[0].reason) == ("a", "b", 1)
        assert core.ended == []  # the engine has ended it by itself


async def test_no_stop_string_before_min_tokens(make_core, serving):
    core = make_core()
    core.reply = bytewise("a.b.c")
    async with serving(core) as server:
        stopping = pb.StoppingCriteria(stop=["."], min_tokens=3)
        events = await collect(server.stub.Generate(prompt(stopping=stopping)))
        assert text_of(events) == "a.b"


async def test_stop_strings_work_without_text(make_core, serving):
    core = make_core()
    core.reply = bytewise("ab.cd")
    async with serving(core) as server:
        output = pb.OutputOptions(text=False, token_ids=True)
        events = await collect(server.stub.Generate(prompt(stopping=pb.StoppingCriteria(stop=["."]), output=output)))
        assert (text_of(events), ids_of(events), finished(events)[0].stop) == ("", list(b"ab."), ".")


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "ab!")])
async def test_a_stop_token_is_counted_and_left_out_of_the_text(make_core, serving, include, text):
    core = make_core()
    core.reply = bytewise("ab!", finish=FinishReason.STOP_TOKEN)
    async with serving(core) as server:
        stopping = pb.StoppingCriteria(stop_token_ids=[ord("!")], include_stop=include)
        events = await collect(server.stub.Generate(prompt(stopping=stopping)))
        end = finished(events)[0]
        assert text_of(events) == text
        assert (end.WhichOneof("matched"), end.stop_token_id, end.completion_tokens) == ("stop_token_id", 33, 3)


async def test_special_tokens_are_shown_on_demand(make_core, serving):
    core = make_core()
    core.reply = lambda request: [(0, [97, 256, 98], FinishReason.LENGTH)]
    async with serving(core) as server:
        assert text_of(await collect(server.stub.Generate(prompt()))) == "ab"
        output = pb.OutputOptions(skip_special_tokens=False)
        assert text_of(await collect(server.stub.Generate(prompt(output=output)))) == "a<|im_start|>b"


async def test_the_first_space_of_an_answer_stays_where_it_goes_on(make_core, serving, byte_model, tmp_path):
    """SentencePiece's decoders leave out the space that begins a text. Behind an open message it parts two words."""
    tokenizer = tokenizers.Tokenizer.from_file(str(byte_model / "tokenizer.json"))
    tokenizer.decoder = decoders.Sequence([tokenizer.decoder, decoders.Strip(" ", 1, 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    core = make_core()
    turns = [pb.ChatMessage(role="assistant", content=[pb.ContentPart(text="It is")])]
    async with serving(core, tokenizer=tmp_path) as server:
        for begun, text in (
            ({"chat": pb.Chat(messages=turns)}, "Ulm"),
            ({"chat": pb.Chat(messages=turns, continue_final_message=True)}, " Ulm"),
            ({"text": "It is"}, " Ulm"),
        ):
            core.reply = bytewise(" Ulm")
            assert text_of(await collect(server.stub.Generate(pb.GenerateRequest(**begun)))) == text


async def test_indexes_interleave_and_usage_counts_the_prompt_once(make_core, serving):
    texts = ("first", "the second", "3")
    core = make_core()
    core.reply = bytewise(*texts)
    async with serving(core) as server:
        events = await collect(server.stub.Generate(prompt("12345678", n=3)))
        assert [text_of(events, index) for index in range(3)] == list(texts)
        ends = finished(events)
        assert {index: end.completion_tokens for index, end in ends.items()} == {0: 6, 1: 11, 2: 2}
        assert kinds(events).count("usage") == 1
        assert kinds(events)[-1] == "usage"
        usage = events[-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (8, 6 + 11 + 2)
        for index in range(3):
            last = max(i for i, e in enumerate(events) if e.HasField("delta") and e.delta.index == index)
            assert last < next(i for i, e in enumerate(events) if e.HasField("finished") and e.finished.index == index)


async def test_one_index_stops_early_and_the_others_go_on(make_core, serving):
    core = make_core()
    async with serving(core) as server:
        call = server.stub.Generate(prompt(request_id="r", n=2, stopping=pb.StoppingCriteria(stop=["."])))
        await call.read()
        core.start("r")
        core.emit("r", 0, list(b"a."))
        core.emit("r", 1, list(b"b"))
        await core.until(lambda: core.ended == [("r", 0)])
        core.emit("r", 0, list(b"late"))
        core.emit("r", 1, list(b"cd"), FinishReason.LENGTH)
        events = await collect(call)
        assert (text_of(events, 0), text_of(events, 1)) == ("a", "bcd")
        assert events[-1].usage.completion_tokens == 5


async def test_a_reader_that_keeps_up_gets_one_message_a_token(make_core, serving):
    core = make_core()
    async with serving(core) as server:
        call = server.stub.Generate(prompt(request_id="r"))
        await call.read()
        core.start("r")
        await call.read()
        for byte in b"token by token":
            core.emit("r", 0, [byte])
            assert (await call.read()).delta.text == chr(byte)
        core.emit("r", 0, [EOS], FinishReason.EOS)
        assert kinds(await collect(call)) == ["finished", "usage"]


async def test_a_slow_reader_gets_merged_deltas_and_the_whole_text(make_core, serving):
    """What a reader does not take is merged, so the server holds messages up to HTTP/2's window and no more."""
    core = make_core(max_model_len=1 << 20)
    count = 40_000
    async with serving(core) as server:
        output = pb.OutputOptions(token_ids=True)
        call = server.stub.Generate(prompt(request_id="slow", output=output))
        await call.read()
        core.start("slow")
        for number in range(count):
            core.emit("slow", 0, [97 + number % 26])
            if number % 64 == 0:
                await asyncio.sleep(0)
        core.emit("slow", 0, [EOS], FinishReason.EOS)
        await asyncio.sleep(0.05)
        events = await collect(call)
        assert text_of(events) == "".join(chr(97 + number % 26) for number in range(count))
        assert len(ids_of(events)) == count + 1
        assert kinds(events).count("delta") < count / 4
        assert events[-1].usage.completion_tokens == count + 1


async def test_tokenize_detokenize_and_get_model(make_core, serving):
    core = make_core()
    async with serving(core) as server:
        reply = await server.stub.Tokenize(pb.TokenizeRequest(text="é!"))
        assert (list(reply.token_ids), list(reply.token_bytes)) == ([0xC3, 0xA9, 33], [b"\xc3", b"\xa9", b"!"])
        assert reply.max_model_len == 4096
        message = pb.ChatMessage(role="user", content=[pb.ContentPart(text="a"), pb.ContentPart(text="b")])
        reply = await server.stub.Tokenize(pb.TokenizeRequest(chat=pb.Chat(messages=[message])))
        assert b"".join(reply.token_bytes).startswith(b"<|im_start|>user\n")
        assert reply.token_ids[0] == 256
        back = await server.stub.Detokenize(pb.DetokenizeRequest(token_ids=[256, 0xC3, 0xA9]))
        assert back.text == "<|im_start|>é"
        back = await server.stub.Detokenize(pb.DetokenizeRequest(token_ids=[256, 97], skip_special_tokens=True))
        assert back.text == "a"
        model = await server.stub.GetModel(pb.GetModelRequest())
        assert list(model.served_names) == ["bytes", "bytes-alias"]
        assert (model.max_model_len, model.vocab_size, list(model.eos_token_ids)) == (4096, 258, [EOS])
        assert (model.page_size, model.kv_pages, model.has_chat_template) == (16, 512, True)
        assert abs(model.created - time.time()) < 60
