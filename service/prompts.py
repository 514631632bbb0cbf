"""Prompts to token ids: a chat is checked, rendered and tokenized; all in threads, never on the event loop."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import grpc

from fulcrum import limits
from fulcrum.v1 import inference_pb2 as pb
from service.chat_template import RESERVED, ChatTemplate, TemplateError
from service.errors import ApiError, Violation, invalid
from service.parsers.output_parser import Reading
from service.parsers.registry import Formats
from service.parsers.think import Think
from service.tokenizer import Tokenizer
from service.tools import json_object, must_call, read_tools
from service.turns import Turns
from service.validate import Violations, given, window_exceeded

_MAX_ARGUMENTS_BYTES = 256 << 10  # of a call: 30 ms to read at the worst
_MAX_KWARGS_BYTES = 64 << 10
# Characters (of a chat, bytes) of a prompt that small ones do not wait for.
_LARGE = 64 << 10
# Few texts have more characters a token: what is longer than such a window is counted before all of it is tokenized.
_DENSE = 6
_ROLES = ("system", "developer", "user", "assistant", "tool")
_T = TypeVar("_T")


class Prompt(NamedTuple):
    """A prompt's token ids, how to read what follows it, and when it was rendered (0: it is no chat)."""

    ids: list[int]
    reading: Reading = Reading()
    rendered: float = 0.0  # time.monotonic()


class Prompts:
    """Renders and tokenizes in its own threads.

    Args:
        tokenizer: the model's.
        template: the model's, or the operator's.
        threads: how many prompts are worked on at once, and as many large ones beside them.
        formats: how the model writes.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, threads: int, formats: Formats) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.formats = formats
        self._threads = ThreadPoolExecutor(2 * threads, thread_name_prefix="tokenize")
        self._turns, self._large_turns = Turns(threads), Turns(threads)

    async def run(self, work: Callable[[], _T], size: int = 0, *, turn: str = "") -> _T:
        """Runs `work`, on so much text, in a thread, in its turn."""
        turns = self._large_turns if size > _LARGE else self._turns
        await turns.take(turn)
        loop = asyncio.get_running_loop()

        def leave(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(turns.leave)

        working = self._threads.submit(work)
        working.add_done_callback(leave)  # the thread goes on, also when nobody waits for it any more
        return await asyncio.wrap_future(working)

    async def text(self, text: str, *, add_special_tokens: bool, window: int, turn: str = "") -> list[int]:
        """Token ids of a plain text.

        Raises ApiError INVALID_ARGUMENT: also for a text that is too long for `window` tokens whatever they are, before
            the work of tokenizing it is done.
        """
        encode = partial(self._encode, text, "text", window, add_special_tokens=add_special_tokens)
        return await self.run(encode, len(text), turn=turn)

    async def chat(self, chat: pb.Chat, *, window: int, turn: str = "") -> Prompt:
        """Renders and tokenizes a chat.

        Raises ApiError INVALID_ARGUMENT (also TEMPLATE_ERROR), FAILED_PRECONDITION (TOOLS_UNSUPPORTED).
        """
        return await self.run(partial(self._chat, chat, window), chat.ByteSize(), turn=turn)

    def close(self) -> None:
        """Lets the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _chat(self, chat: pb.Chat, window: int) -> Prompt:
        count = len(chat.messages)
        if count > window:  # each is a token at least
            raise window_exceeded("chat", window, f"the chat has {count} messages", prompt_tokens=count)
        messages, tools, variables = _read_chat(chat)
        if tools:
            self._refuse_tools(chat.tool_choice)
        continue_final = chat.continue_final_message
        add_generation = given(chat, "add_generation_prompt", not continue_final)
        try:
            text = self.template.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation,
                continue_final_message=continue_final,
                template_kwargs=variables,
            )
        except TemplateError as error:
            text = str(error) or "the template failed"
            code = grpc.StatusCode.INVALID_ARGUMENT
            raise ApiError(code, "TEMPLATE_ERROR", text, field="chat.messages") from error
        rendered = time.monotonic()
        reading = self._reading(chat, text, tools)
        if reading.tools is not None and reading.must_call:
            text += reading.tools.prefill
        ids = self._encode(text, "chat", window, add_special_tokens=False)
        return Prompt(ids, reading, rendered)

    def _refuse_tools(self, choice: pb.ToolChoice) -> None:
        """Raises ApiError where this model, as it is served, has no use for tools or for such a choice."""
        reason = ""
        if not self.template.takes_tools:
            reason = "the model's chat template takes no tools"
        elif self.formats.tools is None and (must_call(choice) or not self.formats.raw_calls):
            reason = "the form of the model's tool calls is not known; the server's --tool-parser tells it"
        if reason:
            raise ApiError(grpc.StatusCode.FAILED_PRECONDITION, "TOOLS_UNSUPPORTED", reason, field="chat.tools")

    def _reading(self, chat: pb.Chat, text: str, tools: list[dict[str, Any]]) -> Reading:
        """How to read what follows the rendered `text`."""
        reasoning, calls = self.formats.reasoning, self.formats.tools if tools else None
        opened = reasoning is not None and _opened(chat, text, reasoning)
        thinks = reasoning is not None and not text.rstrip().endswith(reasoning.closing)
        parallel = given(chat, "parallel_tool_calls", True)
        schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
        if calls is not None and must_call(chat.tool_choice):
            if only := chat.tool_choice.function:
                schemas, parallel = {only: schemas[only]}, False
            return Reading(reasoning, opened, calls, schemas, parallel, thinks and not calls.prefill, must_call=True)
        # An opening that is a special token comes under no grammar, and with it no call.
        special = calls is not None and self.tokenizer.token_id(calls.opening) in self.tokenizer.special_ids
        held = calls is not None and (calls.bare or not special)
        arguments = {tool.name: schemas[tool.name] if held and tool.strict else {} for tool in chat.tools}
        return Reading(reasoning, opened, calls, arguments, parallel, thinks)

    def _encode(self, text: str, field: str, window: int, *, add_special_tokens: bool) -> list[int]:
        fewest = self.tokenizer.fewest_tokens(text)
        if fewest > window:
            raise window_exceeded(field, window, f"the prompt has more than {fewest}", prompt_tokens=fewest)
        try:
            # A million tokens take a second, and a hundred megabytes.
            if len(text) > _DENSE * window and self.tokenizer.exceeds(text, window * 9 // 8):
                raise window_exceeded(field, window, f"the prompt has more than {window}", prompt_tokens=window)
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except ValueError as error:
            raise invalid([Violation(field, str(error))]) from error


def _read_chat(chat: pb.Chat) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """The messages and the tools that may be called, in OpenAI's form, and the further variables for the template.

    Raises ApiError naming every bad field.
    """
    bad = Violations()
    bad.unless(len(chat.messages) > 0, "chat.messages", "there are none")
    bad.most("chat.messages", len(chat.messages), limits.MESSAGES)
    bad.most("chat.template_kwargs_json", len(chat.template_kwargs_json.encode()), _MAX_KWARGS_BYTES, "bytes are given")
    bad.check()
    messages = [_message(message, f"chat.messages[{number}]", bad) for number, message in enumerate(chat.messages)]
    both = chat.continue_final_message and chat.add_generation_prompt
    bad.unless(not both, "chat.continue_final_message", "excludes add_generation_prompt")
    variables = json_object(chat.template_kwargs_json)
    bad.unless(variables is not None, "chat.template_kwargs_json", "is no JSON object")
    for name in variables or {}:
        known = name.isidentifier() and name not in RESERVED
        bad.unless(known, "chat.template_kwargs_json", f"{name!r:.50} cannot be set")
    tools = read_tools(chat, bad)
    bad.check()
    return messages, tools, variables or {}


def _message(message: pb.ChatMessage, where: str, bad: Violations) -> dict[str, Any]:
    """The message in OpenAI's form: a single text is a string, several are a list. Adds its bad fields to `bad`."""
    role = message.role
    bad.unless(role in _ROLES, f"{where}.role", f"must be one of {', '.join(_ROLES)}, not {role[:50]!r}")
    bad.most(f"{where}.content", len(message.content), limits.PARTS)
    texts = [part.text for part in message.content]
    for position, part in enumerate(message.content):
        if part.WhichOneof("part") != "text":
            kind = part.unsupported or "an empty part"
            bad.append(Violation(f"{where}.content[{position}]", f"only text is taken, not {kind:.50}"))
    where = f"{where}.tool_calls"
    bad.most(where, len(message.tool_calls), limits.CALLS)
    bad.unless(not message.tool_calls or role == "assistant", where, "only the assistant calls tools")
    calls = []
    for position, call in enumerate(message.tool_calls):
        bad.unless(bool(call.name), f"{where}[{position}].name", "is empty")
        field, arguments = f"{where}[{position}].arguments_json", None
        if bad.most(field, len(call.arguments_json.encode()), _MAX_ARGUMENTS_BYTES, "bytes are given"):
            arguments = json_object(call.arguments_json)
            bad.unless(arguments is not None, field, "is no JSON object")
        calls.append({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}})
    content = "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]
    further = {
        "name": message.name,
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning,
    }
    return {"role": role, "content": content} | {name: value for name, value in further.items() if value}


def _opened(chat: pb.Chat, text: str, form: type[Think]) -> bool:
    """Whether the rendered `text` ends within reasoning: its generation prompt does, or the message to be continued."""
    if not chat.continue_final_message:
        return text.rstrip().endswith(form.opening)
    final = "".join(part.text for part in chat.messages[-1].content)
    return final.rfind(form.opening) > final.rfind(form.closing)
