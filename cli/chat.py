"""`fulcrum chat`: a conversation with a running engine, a line a turn. Knows the contract's client alone."""

import contextlib
import sys
from collections.abc import Iterator

import click
import grpc

from cli.run import Failed
from cli.settings import Params, engine_credentials, first_key
from cli.terminal import fields, say, system
from fulcrum.client import FulcrumError, chat_request
from fulcrum.sync_client import SyncFulcrumClient
from fulcrum.v1 import inference_pb2 as pb

_CONNECT_SECONDS = 10.0
_NOBODY = grpc.StatusCode.UNAVAILABLE


def run_chat(params: Params) -> None:
    """Answers each line of standard input on standard output; everything else goes to standard error. Raises Failed."""
    interactive = sys.stdin.isatty()
    tls = {"credentials": engine_credentials(params), "tls_name": params["engine_tls_name"]}
    with SyncFulcrumClient(params["address"], api_key=first_key(params), **tls) as client:
        try:
            name = client.get_model(deadline=_CONNECT_SECONDS).served_names[0]
            if interactive:
                click.echo(f"Chatting with {name}. /reset forgets the conversation, /exit ends it.", err=True)
            _converse(client, params, interactive=interactive)
        except FulcrumError as error:
            hint = " (does a server run there? One with TLS needs --engine-ca)" if error.code is _NOBODY else ""
            raise Failed(f"{params['address']}: {error}{hint}") from error


def _converse(client: SyncFulcrumClient, params: Params, *, interactive: bool) -> None:
    messages: list[tuple[str, str]] = []
    for line in _lines(interactive=interactive):
        if line == "/exit":
            return
        if line == "/reset":
            messages.clear()
            continue
        messages.append(("user", line))
        answer: list[str] = []
        try:
            _answer(client, chat_request([*system(params), *messages], **fields(params)), answer)
        except KeyboardInterrupt:
            click.echo(" [stopped]", err=True)
        except FulcrumError as error:
            if not interactive:
                raise
            click.echo(f"Error: {error}", err=True)
            messages.pop()
            continue
        click.echo()
        messages.append(("assistant", "".join(answer)))


def _answer(client: SyncFulcrumClient, request: pb.GenerateRequest, answer: list[str]) -> None:
    """Prints the answer as it comes, and gathers it in `answer`, so that it is known also when it is interrupted."""
    thinking = False
    with client.generate(request) as events:
        for event in events:
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
    edited = interactive and sys.stdout.isatty()  # else input() would write its prompt among the answers
    if edited:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() its line editing
    while True:
        try:
            if interactive and not edited:
                click.echo("> ", nl=False, err=True)
            line = f"{input('> ')}\n" if edited else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            line = ""
        if not line:
            if interactive:
                click.echo(err=True)
            return
        if line.strip():
            yield line.strip()
