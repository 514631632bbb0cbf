"""InferenceService: the life of one call. Knows the engine only through CoreClient; nothing of sockets and health."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from google.protobuf.json_format import MessageToJson

from engine.client import CoreClient, CoreDied
from engine.messages import RequestStart
from engine.request import RejectReason, Request, RequestRejected
from engine.stream import RequestStream
from fulcrum.v1 import inference_pb2 as pb
from fulcrum.v1 import inference_pb2_grpc
from service.aio_server import Context, write_first
from service.auth import Authenticator, Caller
from service.choice import Choice
from service.errors import Violation, draining, engine_dead, invalid
from service.figures import Figures
from service.grammar import Compiled, GrammarCompiler, invalid_grammar
from service.grammar_worker import Constraint
from service.live import LiveCalls
from service.logprobs import prompt_pieces
from service.model import ServedModel
from service.output_grammar import output_grammar
from service.parsers.output_parser import Reading
from service.prompts import Prompt
from service.record import Record
from service.spans import export
from service.tools import must_call
from service.validate import Plan, Violations, fit, given, plan, refusal, window_exceeded
from telemetry.tracing import Tracer

logger = logging.getLogger(__name__)

_LOGGED_CHARACTERS = 16_384


@dataclass(eq=False, kw_only=True)
class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Serves one model.

    Args:
        core: the engine.
        model: tokenizer, template, defaults and names.
        authenticator: tells what a caller may ask for.
        live: the open Generate calls.
        grammars: compiles what constrains a text.
        share_prefixes, log_requests: as in ServiceConfig.
        figures: counts what happens.
        tracer: makes spans of it (None: there are none).
    """

    core: CoreClient
    model: ServedModel
    authenticator: Authenticator
    live: LiveCalls
    grammars: GrammarCompiler
    figures: Figures
    tracer: Tracer | None
    share_prefixes: bool
    log_requests: bool

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Everything that can be refused is refused before `Accepted`; see the proto for the order of the events."""
        record = Record(self.figures, context.invocation_metadata())
        if self.core.draining:
            raise draining()
        try:
            async with self.live.call():
                try:
                    await self._generate(request, context, record)
                except CoreDied as error:
                    raise engine_dead() from error
        except BaseException as error:
            record.end(error, context.time_remaining())
            raise
        else:
            record.end(None, None)
        finally:
            if self.tracer is not None:
                export(self.tracer, record)

    async def _generate(self, request: pb.GenerateRequest, context: Context, record: Record) -> None:
        core, model = self.core, self.model
        name = model.resolve(request.model)
        caller = self.authenticator.caller(context.invocation_metadata())
        asked = plan(request, core.info, model.defaults, caller)
        if asked.constraint is not None and must_call(request.chat.tool_choice):
            text = f"{asked.constraint.kind} and a call that must come exclude each other"
            raise invalid([Violation("chat.tool_choice", text)])
        turn = _turn(caller, context)
        field, prompt = await self._prompt(request, turn)
        marks = record.marks
        if prompt.rendered:
            marks.append(("rendered", prompt.rendered))
        marks.append(("tokenized", time.monotonic()))
        job = fit(asked, prompt.ids, field, core.info)
        grammar = await self._grammar(asked.constraint, prompt.reading, turn)
        if grammar is not None:
            marks.append(("compiled", time.monotonic()))
        job = replace(
            job,
            salt=self._salt(caller.tenant, job.salt),
            arrival=record.arrival,
            marks=tuple(marks) if core.info.traces else (),
            grammar="" if grammar is None else grammar.key,
        )
        stream = await self._submit(job, grammar, field)
        record.accept(job, name)
        about, what = (job.request_id, record.label), record.fields
        if self.log_requests:
            shown = MessageToJson(request, indent=None, preserving_proto_field_name=True, ensure_ascii=False)
            logger.info("request %s (%s): %.*s", job.request_id, record.label, _LOGGED_CHARACTERS, shown)
        logger.debug("request %s (%s) is accepted: %d prompt tokens", *about, len(job.prompt), extra=what)
        try:
            await write_first(context, pb.GenerateResponse(accepted=pb.Accepted(request_id=job.request_id, model=name)))
            goes_on = field != "chat" or request.chat.continue_final_message
            begin = partial(self._choice, asked=asked, after_prompt=goes_on, reading=prompt.reading)
            usage = await self._stream(stream, job, begin, record, context)
            await context.write(pb.GenerateResponse(usage=usage))
            logger.debug("request %s (%s) is answered: %d tokens", *about, record.tokens, extra=what)
            core.note(job.request_id, "sent")
        finally:
            # Before anything is forgotten. Once the core has ended the request, its id may be another's.
            if not stream.ended:
                core.abort_soon(stream)
                logger.info("request %s (%s) ended early", *about, extra=what)

    def _salt(self, tenant: str, salt: str) -> str:
        """A salt that no other tenant has, whatever he asks for: names of tenants hold no NUL."""
        return f"{tenant}\0{salt}" if tenant and (salt or not self.share_prefixes) else salt

    async def _grammar(self, asked: Constraint | None, reading: Reading, turn: str) -> Compiled | None:
        """What the output must follow; None where it is free."""
        constraint = output_grammar(asked, reading)
        if constraint is None:
            return None
        blamed = "chat.tools" if asked is None else asked.kind
        if asked is not None and reading.strict:
            # Alone first: what is wrong with the whole are the tools, then.
            await self.grammars.compile(asked, turn=turn)
            blamed = "chat.tools"
        return await self.grammars.compile(constraint, blamed, turn=turn)

    async def _prompt(self, request: pb.GenerateRequest, turn: str) -> tuple[str, Prompt]:
        """The prompt, and the field that it came from."""
        field, window = request.WhichOneof("prompt"), self.core.info.max_model_len
        if field == "token_ids":
            count = len(request.token_ids.ids)
            if count > window:  # before millions of them are copied
                raise window_exceeded(field, window, f"the prompt has {count}", prompt_tokens=count)
            return field, Prompt(list(request.token_ids.ids))
        if field == "text":
            ids = await self.model.prompts.text(request.text, add_special_tokens=True, window=window, turn=turn)
            return field, Prompt(ids)
        if field == "chat":
            return field, await self.model.prompts.chat(request.chat, window=window, turn=turn)
        raise invalid([Violation("prompt", "one of text, token_ids and chat is needed")])

    async def _submit(self, job: Request, grammar: Compiled | None, prompt_field: str) -> RequestStream:
        """The core may have forgotten a grammar that it was given: it gets it once more then."""
        for last in (grammar is None, True):
            if grammar is not None:
                await self.core.load_grammar(grammar.key, grammar.data, lambda: self.grammars.vocabulary)
            try:
                return await self.core.submit(job)
            except RequestRejected as rejected:
                if last or rejected.reason is not RejectReason.UNKNOWN_GRAMMAR:
                    if grammar is not None and rejected.field == "constraint":
                        raise invalid_grammar(grammar.field, str(rejected)) from rejected
                    raise refusal(rejected, job, prompt_field, self.core.info) from rejected
        raise AssertionError("the last try returns or raises")

    async def _stream(
        self, stream: RequestStream, job: Request, begin: Callable[[int], Choice], record: Record, context: Context
    ) -> pb.Usage:
        """Writes everything between Accepted and Usage; a write waits for a slow reader, the stream merges.

        A choice begins with its first tokens: of those that wait there may be two million, of a kilobyte each.
        """
        core, tokenizer, write = self.core, self.model.prompts.tokenizer, context.write
        choices: dict[int, Choice] = {}
        running = job.params.n
        told = 1  # the next of the prompt's logprobs
        async for event in stream:
            if isinstance(event, RequestStart):
                record.start(event.at, event.cached_tokens)
                started = pb.Started(prompt_tokens=record.prompt_tokens, cached_tokens=record.cached_tokens)
                await write(pb.GenerateResponse(started=started))
                continue
            for output in event:
                if output.prompt_logprobs:
                    top = job.params.prompt_logprobs or 0
                    for piece in prompt_pieces(tokenizer, job.prompt, told, output.prompt_logprobs, top):
                        await write(pb.GenerateResponse(prompt_logprobs=piece))
                        told += len(piece.tokens)
                    if not output.token_ids and output.finish is None:
                        continue
                choice = choices.get(output.index) or choices.setdefault(output.index, begin(output.index))
                if choice.finish is not None:
                    continue  # sampled after a stop string had ended it
                record.take(output.index, len(output.token_ids))
                messages = choice.take(output)
                if choice.finish is not None:
                    running -= 1
                    record.finish(choice)
                    if output.finish is None:  # a stop string
                        core.end_sequence(stream, choice.index)
                for message in messages:
                    await write(message)
            if not running:
                break
        if running:
            raise RuntimeError(f"the engine ended request {record.request_id} with {running} sequences unfinished")
        return record.usage()

    def _choice(self, index: int, asked: Plan, after_prompt: bool, reading: Reading) -> Choice:
        if not asked.text:  # stop strings are looked for all the same
            reading = Reading()
        wanted = asked.text or asked.stop
        text = self.model.text_stream(asked, after_prompt=after_prompt, shown=reading.markers) if wanted else None
        return Choice(index, asked, text, self.model.prompts.tokenizer, reading.parser())

    # ----------------------------------------------------------------------------------------------- the other RPCs

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Token ids and bytes of a text or a rendered chat."""
        self.model.resolve(request.model)
        prompts, window = self.model.prompts, self.core.info.max_model_len
        turn = _turn(self.authenticator.caller(context.invocation_metadata()), context)
        match request.WhichOneof("prompt"):
            case "text":
                special = given(request, "add_special_tokens", True)
                ids = await prompts.text(request.text, add_special_tokens=special, window=window, turn=turn)
            case "chat":
                ids = (await prompts.chat(request.chat, window=window, turn=turn)).ids
            case _:
                raise invalid([Violation("prompt", "one of text and chat is needed")])
        token_bytes = await prompts.run(lambda: list(map(prompts.tokenizer.token_bytes, ids)), turn=turn)
        return pb.TokenizeResponse(token_ids=ids, token_bytes=token_bytes, max_model_len=self.core.info.max_model_len)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """The text of token ids."""
        self.model.resolve(request.model)
        prompts, info = self.model.prompts, self.core.info
        turn = _turn(self.authenticator.caller(context.invocation_metadata()), context)
        count = len(request.token_ids)
        if count > info.max_model_len:
            raise window_exceeded("token_ids", info.max_model_len, f"{count} token ids are given")

        def detokenized() -> str:
            ids, bad = list(request.token_ids), Violations()
            bad.token_ids("token_ids", ids, info.vocab_size)
            bad.check()
            return prompts.tokenizer.decode(ids, skip_special_tokens=request.skip_special_tokens)

        return pb.DetokenizeResponse(text=await prompts.run(detokenized, turn=turn))

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """What is served, and its limits."""
        self.model.resolve(request.model)
        info = self.core.info
        return pb.GetModelResponse(
            served_names=self.model.names,
            architecture=info.architecture,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            dtype=info.dtype,
            device=info.device,
            page_size=info.page_size,
            kv_pages=info.num_pages,
            has_chat_template=self.model.has_chat_template,
            version=info.version,
            created=self.model.created,
        )


def _turn(caller: Caller, context: Context) -> str:
    """In whose turn the work is done: the tenant's, or without one the connection's."""
    return caller.tenant or context.peer()
