"""`fulcrum trace`: a request's timeline as a table, and the engine's latest steps as a Chrome trace file."""

import json
import re
from pathlib import Path
from typing import Any

import click

from cli.settings import Params, engine_credentials, first_key
from fulcrum.client import FulcrumError
from fulcrum.sync_client import admin_service
from fulcrum.v1 import inference_pb2 as pb

# The id of an answer over HTTP: the engine's own behind a kind.
_HTTP_ID = re.compile(r"(?:chatcmpl-|cmpl-|resp_)([0-9a-f]{32})")


def timeline(trace: pb.GetTraceResponse) -> str:
    """A line for each event: milliseconds since arrival, milliseconds since the line before, what happened."""
    lines, before = [f"{'ms':>12} {'+ms':>10}  event"], 0.0
    for event in trace.events:
        at = event.at_seconds * 1e3
        about = " ".join(f"{name}={value}" for name, value in sorted(event.attributes.items()))
        lines.append(f"{at:12.3f} {at - before:10.3f}  {event.kind:<12} {about}".rstrip())
        before = at
    return "\n".join(lines)


def chrome_trace(steps: list[pb.StepTrace]) -> dict[str, Any]:
    """Steps in the Trace Event Format, which Perfetto and chrome://tracing read.

    One track for what the engine's thread does (schedule, launch, wait, process), one for the device.
    """
    origin = steps[0].scheduling if steps else 0.0
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}}
        for tid, name in enumerate(("engine", "device"))
    ]

    def add(tid: int, name: str, start: float, end: float, step: pb.StepTrace) -> None:
        about = {name: getattr(step, name) for name in ("step_id", "rows", "tokens", "samples", "admitted", "error")}
        times = {"ts": (start - origin) * 1e6, "dur": (end - start) * 1e6}  # microseconds
        events.append({"ph": "X", "cat": "step", "name": name, "pid": 1, "tid": tid, **times, "args": about})

    for step in steps:
        add(0, "schedule", step.scheduling, step.scheduled, step)
        add(0, "launch", step.scheduled, step.launched, step)
        add(0, "wait", step.collecting, step.collected, step)
        add(0, "process", step.collected, step.processed, step)
        if step.busy_seconds:
            add(1, f"step {step.step_id}", step.collected - step.busy_seconds, step.collected, step)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def run_trace(request_id: str | None, steps: Path | None, last: int | None, connection: Params) -> None:
    """Prints the request's timeline, writes the steps' file, or both. Raises click.ClickException."""
    address, tls = connection["admin_address"], engine_credentials(connection)
    tls_name = connection["engine_tls_name"]
    try:
        with admin_service(address, api_key=first_key(connection), credentials=tls, tls_name=tls_name) as (stub, given):
            if request_id is not None:
                answer = _HTTP_ID.fullmatch(request_id)
                request = pb.GetTraceRequest(request_id=answer[1] if answer else request_id)
                click.echo(timeline(stub.GetTrace(request, **given)))
            if steps is not None:
                kept = list(stub.GetSteps(pb.GetStepsRequest(last=last), **given).steps)
                steps.write_text(json.dumps(chrome_trace(kept)), encoding="utf-8")
                click.echo(
                    f"{len(kept)} steps are in {steps}: open it in ui.perfetto.dev or chrome://tracing", err=True
                )
    except OSError as error:
        raise click.ClickException(str(error)) from error
    except FulcrumError as error:
        raise click.ClickException(f"{address}: {error}") from error
