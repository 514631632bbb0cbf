"""`fulcrum batch`: every request of a file, answered into another one. Knows HTTP, and how a stack is started.

The requests go to the gateway as any client's would, so that checks, defaults and answers are those of a server.
"""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli import processes, settings
from cli.batch_file import Answers, BatchFileError, Requests, Row
from cli.run import Failed, run
from cli.serve import Both, running
from cli.settings import Params
from cli.signals import Stopped, StopSignals, unless

if TYPE_CHECKING:
    import httpx
    from tqdm import tqdm

# A server of which only the address is known.
_CONCURRENCY = 64
# "Try again": after these seconds, or as late as the server asks for. When they are used up (five minutes), it stops.
_TRY_AGAIN = frozenset({429, 503})
_WAITS = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 60.0, 120.0)
_LONGEST_WAIT = 600.0
_MAX_PRIORITY = 2**31 - 1
_HERE = ("all://localhost", "all://127.0.0.1", "all://[::1]")


@dataclass(frozen=True, slots=True)
class Server:
    """Where the requests go.

    Args:
        url: of the HTTP server, without /v1.
        concurrency: requests that run together where a person does not say.
        both: the processes, where they are this command's own.
    """

    url: str
    key: str | None
    concurrency: int
    both: Both | None = None


def run_batch(source: Path, target: Path, params: Params, engine: click.Command, gateway: click.Command) -> None:
    """Answers every row of `source` that `target` does not hold yet. Raises: Failed; ConfigError for the files."""
    settings.engine_config(params, Path())  # wrong settings are told before anything is loaded
    processes.raise_file_limit()  # a connection for each request under way
    params = {**params, "api_key": settings.first_key(params)}
    if params["base_url"] and not settings.is_http(params["base_url"]):
        raise settings.ConfigError(f"--base-url must be http://HOST:PORT/v1 or https://..., not {params['base_url']!r}")
    try:
        for path in (source, target):
            if path.exists() and not path.is_file():
                raise BatchFileError(f"{path} is no regular file, and it is read more than once")
        if target.exists() and target.samefile(source):
            raise BatchFileError(f"{target} is the input")
        requests = Requests(source)
        with Answers(target, requests) as answers:
            try:
                if len(answers.done) < len(requests):
                    run(_run(requests, answers, params, engine, gateway))
            finally:
                done = len(answers.done)
                told = f"{done:,} answered, {answers.failed:,} of them with an error, {len(requests) - done:,} left"
                click.echo(f"{len(requests):,} rows: {told}")
    except BatchFileError as error:
        raise settings.ConfigError(str(error)) from error
    except OSError as error:
        raise Failed(str(error)) from error
    if params["fail_on_error"] and answers.failed:
        raise SystemExit(1)


def _client(server: Server, seconds: float, concurrency: int) -> "httpx.AsyncClient":
    """For requests of so many seconds. Raises: ConfigError for a proxy that cannot be used."""
    import httpx

    try:
        return httpx.AsyncClient(
            base_url=server.url,
            headers={"x-request-timeout": str(seconds)}
            | ({"authorization": f"Bearer {server.key}"} if server.key else {}),
            # The server keeps the time; this is for one that is stuck.
            timeout=httpx.Timeout(seconds + 30, connect=30, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=concurrency),
            trust_env=server.both is None,
            mounts=dict.fromkeys(_HERE),  # no proxy between this machine and itself
        )
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise settings.ConfigError(f"the proxy that the environment names cannot be used: {error}") from error


async def _run(
    requests: Requests, answers: Answers, params: Params, engine: click.Command, gateway: click.Command
) -> None:
    from tqdm import tqdm

    signals = StopSignals()
    left = len(requests) - len(answers.done)
    try:
        async with _server(params, engine, gateway, signals) as server:
            concurrency = min(params["max_concurrency"] or server.concurrency, left)
            seconds = params["request_timeout"]
            client = _client(server, seconds, concurrency)
            bar = tqdm(
                total=len(requests), initial=len(answers.done), unit="row", disable=None if params["progress"] else True
            )
            with bar:
                async with client:
                    work = _answer_all(client, requests.rows(frozenset(answers.done)), answers, concurrency, bar)
                    died = [server.both.died()] if server.both else []
                    await unless(work, signals.stopped(), *died)
    except Stopped as error:
        raise Failed("stopped; the same command goes on from here") from error


@contextlib.asynccontextmanager
async def _server(
    params: Params, engine: click.Command, gateway: click.Command, signals: StopSignals
) -> AsyncIterator[Server]:
    """The server that --base-url names; without it one of our own, on loopback ports that nobody else has a key for."""
    if params["base_url"]:
        url = params["base_url"].rstrip("/").removesuffix("/v1")
        yield Server(url, params["api_key"], _CONCURRENCY)
        return
    key, own_key = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    any_priority = _MAX_PRIORITY if params["max_priority"] is None else params["max_priority"]
    own: Mapping[str, Any] = processes.with_counts(
        {**params, "host": "127.0.0.1", "port": 0, "grpc_port": 0, "max_priority": any_priority, "grace": 1.0}
    )

    async with running(own, engine, gateway, signals, api_keys=(key,), gateway_keys=(own_key,)) as both:
        yield Server(f"http://{both.address}", key, both.report.max_num_seqs, both)


async def _answer_all(
    client: "httpx.AsyncClient", rows: Iterator[Row], answers: Answers, concurrency: int, bar: "tqdm[Any]"
) -> None:
    """Raises: Failed, OSError; then the answers that are there are in the file."""

    async def work() -> None:
        for row in rows:  # one iterator for all workers
            answers.add(await _answer(client, row))
            bar.set_postfix(failed=answers.failed, refresh=False)
            bar.update()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    except* (Failed, OSError) as errors:
        raise errors.exceptions[0] from None


async def _answer(client: "httpx.AsyncClient", row: Row) -> dict[str, Any]:
    """The output line of a row. Raises: Failed where the server is gone or busy for good, or does not know the key."""
    import httpx

    data = json.dumps(row.body).encode()
    problem = ""
    for wait in (*_WAITS, None):
        try:
            response = await client.post(row.url, content=data, headers={"content-type": "application/json"})
        except httpx.ReadTimeout as error:
            return _error(row, "request_timeout", f"no answer from {client.base_url}: {error or 'it took too long'}")
        except httpx.DecodingError as error:
            return _error(row, "invalid_response", f"its content-encoding is not what it says: {error}")
        except httpx.TransportError as error:
            asked, problem = None, f"{error or type(error).__name__}"
        else:
            if response.status_code == httpx.codes.UNAUTHORIZED:  # no fault of the row
                raise Failed(f"{client.base_url} wants another --api-key; then the same command goes on from here")
            if response.status_code not in _TRY_AGAIN:
                return _line(row, response)
            asked, problem = response.headers.get("retry-after"), f"status {response.status_code}"
        if wait is not None:
            least = float(asked) if asked is not None and asked.isdecimal() else 0.0
            await asyncio.sleep(max(wait, min(least, _LONGEST_WAIT)))
    raise Failed(f"{client.base_url}: {problem}, {len(_WAITS) + 1} times; the same command goes on from here")


def _line(row: Row, response: "httpx.Response") -> dict[str, Any]:
    try:
        body = response.json()
    except (ValueError, RecursionError):  # something between us and the server has answered
        message = f"status {response.status_code}, and no JSON: {response.text[:200]!r}"
        return _error(row, "invalid_response", message)
    told = {"status_code": response.status_code, "request_id": response.headers.get("x-request-id"), "body": body}
    return _named(row) | {"response": told, "error": None}


def _error(row: Row, code: str, message: str) -> dict[str, Any]:
    return _named(row) | {"response": None, "error": {"code": code, "message": message}}


def _named(row: Row) -> dict[str, Any]:
    return {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": row.custom_id}
