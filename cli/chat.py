"""`fulcrum chat`: a conversation with a running engine, a line a turn. Knows the contract's client alone."""

import asyncio
import contextlib
import sys
from collections.abc import Iterator

import click

from cli.requests import chat_request
from cli.run import Failed
from cli.settings import Params, engine_credentials
from cli.terminal import say
from fulcrum.client import FulcrumClient, FulcrumError, message
from fulcrum.v1 import inference_pb2 as pb

_CONNECT_SECONDS = 10.0


def run_chat(params: Params) -> None:
    """Answers each line of standard input on standard output; everything else goes to standard error. Raises Failed."""
    interactive = sys.stdin.isatty()
    with asyncio.Runner() as runner:
        client = runner.run(_connect(params))
        try:
            name = runner.run(client.get_model(deadline=_CONNECT_SECONDS)).served_names[0]
            if interactive:
                click.echo(f"Chatting with {name}. /reset forgets the conversation, /exit ends it.", err=True)
            _converse(runner, client, params, interactive=interactive)
        except FulcrumError as error:
            raise Failed(f"{params['address']}: {error}") from error
        finally:
            runner.run(client.close())


async def _connect(params: Params) -> FulcrumClient:
    key = (params["api_key"] or "").split()  # the variable may hold several, as a server's does
    return FulcrumClient(  # belongs to the running loop
        params["address"],
        api_key=key[0] if key else None,
        credentials=engine_credentials(params),
        tls_name=params["engine_tls_name"],
    )


def _converse(runner: asyncio.Runner, client: FulcrumClient, params: Params, *, interactive: bool) -> None:
    messages: list[pb.ChatMessage] = []
    for line in _lines(interactive=interactive):
        if line == "/exit":
            return
        if line == "/reset":
            messages.clear()
            continue
        messages.append(message("user", line))
        answer: list[str] = []
        try:
            runner.run(_answer(client, chat_request(messages, params), answer))
        except KeyboardInterrupt:
            click.echo(" [stopped]", err=True)
        except FulcrumError as error:
            if not interactive:
                raise
            click.echo(f"Error: {error}", err=True)
            messages.pop()
            continue
        click.echo()
        messages.append(message("assistant", "".join(answer)))


async def _answer(client: FulcrumClient, request: pb.GenerateRequest, answer: list[str]) -> None:
    """Prints the answer as it comes, and gathers it in `answer`, so that it is known also when it is interrupted."""
    thinking = False
    async with contextlib.aclosing(client.generate(request)) as events:
        async for event in events:
            if isinstance(event, pb.Delta):
                if event.reasoning:
                    say(event.reasoning, dim=True, err=True)
                    thinking = True
                if thinking and event.text:
                    click.echo(err=True)
                    thinking = False
                answer.append(event.text)
                say(event.text)


def _lines(*, interactive: bool) -> Iterator[str]:
    """Lines that hold something, until the end of standard input or, at the prompt, Ctrl-C."""
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() its line editing
    while True:
        try:
            line = input("> ") if interactive else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            click.echo(err=True)
            return
        if not line and not interactive:
            return
        if line.strip():
            yield line.strip()
