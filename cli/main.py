"""The `fulcrum` command: its commands and their options. A room is imported only by the command that needs it."""

import platform
import secrets
import sys
from importlib.metadata import distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from cli import options
from cli.outermost import Outermost

# In a child: tells the parent where it serves, and ends when the parent does.
_supervised = click.option("--supervised", is_flag=True, hidden=True)
_ENGINE, _GATEWAY = ("torch", "tokenizers", "tqdm"), ("fastapi", "uvicorn")


def _need(extras: str, *packages: str) -> None:
    """Raises click.ClickException, which says how to install what the command needs, where it is not there."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise click.ClickException(f"{missing[0]} is missing: pip install 'fulcrum-llm[{extras}]'")


@click.group(cls=Outermost, context_settings=options.CONTEXT)
@click.version_option(version("fulcrum-llm"), prog_name="fulcrum")
def main() -> None:
    """An LLM inference service: a streaming gRPC engine, and a gateway that speaks OpenAI's API.

    MODEL is a folder in Hugging Face layout, a GGUF file or a hub id; without one, SmolLM2-135M-Instruct is
    fetched once. Every option can also be given by the variable that its help names.
    """


@main.command()
@options.model
@options.server
@options.http_server
@options.grpc_server
@options.model_files
@options.engine_settings
@options.service_settings
def serve(**params: Any) -> None:
    """Run an engine and a gateway together.

    Ctrl-C ends both when running requests are done; a second one ends them at once.
    """
    _need("engine,gateway", *_ENGINE, *_GATEWAY)
    from cli.run import serve_both

    serve_both(params, engine, gateway)


@main.command()
@options.model
@options.server
@options.grpc_server
@options.model_files
@options.engine_settings
@options.service_settings
@_supervised
@click.option("--own-folder", type=click.Path(path_type=Path), hidden=True)
def engine(**params: Any) -> None:
    """Run the engine alone: a gRPC server around one model."""
    _need("engine", *_ENGINE)
    from cli.run import serve_engine

    serve_engine(params, service_worker)


@main.command(hidden=True)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--core", type=click.Path(path_type=Path), required=True)
@click.option("--own-address")
@click.option("--admin/--no-admin", default=True)
@options.server
@options.grpc_server
@options.model_files
@options.service_settings
@_supervised
def service_worker(**params: Any) -> None:
    """Run one of several service processes of an engine; started by `fulcrum engine`."""
    from cli.run import serve_worker

    serve_worker(params)


@main.command()
@options.option(
    "--engine", "Engine servers, all of the same model.", default="127.0.0.1:50051", metavar="HOST:PORT[,...]"
)
@options.option("--engine-key", "Key that this gateway shows to the engines, one of their gateway keys.")
@options.option("--engine-admin", "An engine's administration: the page at / shows what it does.", metavar="ADDRESS")
@options.server
@options.http_server
@options.engine_tls
@_supervised
@click.option("--listener", type=int, hidden=True)
def gateway(**params: Any) -> None:
    """Run the gateway alone: OpenAI's API over HTTP, in front of running engines."""
    _need("gateway", *_GATEWAY)
    from cli.run import serve_gateway

    serve_gateway(params, gateway)


@main.command()
@click.argument("prompt", required=False)
@options.option("--model", "Folder, GGUF file or hub id.", show_default="SmolLM2-135M-Instruct")
@options.option("--raw/--chat", "Continue the prompt as it is, without the chat template.", default=False)
@options.sampling
@options.model_files
@options.engine_settings
def generate(prompt: str | None, **params: Any) -> None:
    """Answer PROMPT (or what standard input holds) in the terminal, without a server."""
    _need("engine", *_ENGINE)
    from cli.generate import generate_text
    from cli.run import utf8_alone

    with utf8_alone():
        generate_text(sys.stdin.read() if prompt in (None, "-") else str(prompt), params)


@main.command()
@click.argument("source", metavar="INPUT", type=options.existing_file)
@click.argument("target", metavar="OUTPUT", type=click.Path(dir_okay=False, path_type=Path))
@options.option("--model", "Folder, GGUF file or hub id.", show_default="SmolLM2-135M-Instruct")
@options.batch
@options.model_files
@options.engine_settings
@options.service_settings
@options.workers
@options.restarts
def batch(source: Path, target: Path, **params: Any) -> None:
    """Answer every request of INPUT into OUTPUT, both in OpenAI's batch format (a JSON object a line).

    Runs an engine and a gateway of its own, unless --base-url names a server. Lines of OUTPUT come in the order in
    which they are answered. Interrupted or killed, the same command goes on where it was: rows that OUTPUT holds are
    skipped.
    """
    _need("engine,gateway", "httpx", "msgspec", "tqdm")
    from cli.batch import run_batch

    run_batch(source, target, params, engine, gateway)


@main.command()
@options.option("--address", "HOST:PORT of a running engine (its gRPC port).", default="127.0.0.1:50051")
@options.option("--api-key", "Key that the engine wants (of several, the first).")
@options.engine_tls
@options.sampling
def chat(**params: Any) -> None:
    """Chat with a running server.

    Each line of standard input is a turn. /reset forgets the conversation, /exit ends it; Ctrl-C stops an answer.
    """
    from cli.chat import run_chat
    from cli.run import utf8_alone

    with utf8_alone():
        run_chat(params)


@main.command()
@click.argument("request_id", required=False)
@options.option("--admin-address", "HOST:PORT or unix:/PATH of the engine's administration.", required=True)
@options.option("--api-key", "Key that the engine wants there (of several, the first).")
@options.option(
    "--steps", "Write the latest steps here.", type=click.Path(dir_okay=False, writable=True, path_type=Path)
)
@options.option("--last", "So many steps.", type=click.IntRange(1, 2**31 - 1), show_default="32768")
@options.engine_tls
def trace(request_id: str | None, steps: Path | None, last: int | None, **connection: Any) -> None:
    """Show the timeline of a request, and write the engine's latest steps as a Chrome (Perfetto) trace file.

    The engine must have been started with --trace-requests.
    """
    if request_id is None and steps is None:
        raise click.UsageError("give a request's id, --steps FILE, or both")
    from cli.run import utf8_alone
    from cli.trace import run_trace

    with utf8_alone():
        run_trace(request_id, steps, last, connection)


@main.command(
    add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Run load tests: of this server, or of any that speaks OpenAI's API."""
    _need("bench", "numpy", "msgspec", "httptools", "httpx", "tqdm", "uvloop")
    from cli.bench import bench as group

    group.main(arguments, prog_name="fulcrum bench")


@main.command("key")
@click.argument("tenant")
@click.option(
    "--priority",
    type=click.IntRange(-999_999_999, 999_999_999),
    help="Highest priority of its requests (without: the server's --max-priority).",
)
@click.option("--admin", is_flag=True, help="It may administer the engine over TCP.")
@click.option("--gateway", is_flag=True, help="It is a gateway's, which may speak for any tenant.")
def make_key(tenant: str, priority: int | None, admin: bool, gateway: bool) -> None:
    """Make an API key of TENANT.

    Standard output gets its line for --api-key-file, standard error the key itself, which is kept nowhere.
    """
    from fulcrum.keys import Key, digest, is_tenant

    if not is_tenant(tenant):
        raise click.BadParameter("must be 1 to 64 letters, digits, '.', '_' or '-'", param_hint="TENANT")
    key = f"sk-{secrets.token_urlsafe(32)}"
    click.echo(key, err=True)
    click.echo(Key(tenant, digest(key), priority, admin, gateway).line())


@main.command("version")
def show_version() -> None:
    """Show the versions of Fulcrum and of what it stands on."""
    installed = {each.name: each.version for each in distributions()}
    click.echo(f"fulcrum {installed['fulcrum-llm']}\npython {platform.python_version()}")
    for name in ("torch", "triton", "tokenizers", "safetensors", "grpcio", "protobuf", "fastapi", "uvicorn"):
        click.echo(f"{name} {installed.get(name, 'not installed')}")
