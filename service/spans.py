"""The trace of one Generate call, made of its record when it has ended. Knows nothing of how traces travel."""

from service.record import Record
from telemetry.tracing import Tracer, fail, nanoseconds


def export(tracer: Tracer, record: Record) -> None:
    """A span of the call with its events, and in it one for each phase that it reached (the times in Usage)."""
    span = tracer.serve("fulcrum.v1.InferenceService/Generate", record.metadata or (), record.arrival)
    span.set_attributes(
        {
            # Names of OpenTelemetry's conventions for generative AI.
            "gen_ai.request.model": record.model,
            "gen_ai.response.id": record.request_id,
            "gen_ai.response.finish_reasons": record.reasons,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.tokens,
            "fulcrum.x_request_id": record.label,
        }
    )
    events: tuple[tuple[str, float, dict[str, object]], ...] = (
        *((name, at, {}) for name, at in record.marks),
        ("accepted", record.accepted, {}),
        ("started", record.started, {"cached_tokens": record.cached_tokens}),
        ("first token", record.first, {}),
        ("finished", record.ended, {"reasons": record.reasons}),
    )
    for name, at, attributes in events:
        if at:
            span.add_event(name, attributes, nanoseconds(at))
    begins = (record.accepted and record.arrival, record.started, record.first)
    ends = (record.started, record.first, record.last)
    for name, begin, end in zip(("queue", "prefill", "decode"), begins, ends, strict=True):
        if begin:
            tracer.child(span, name, begin, end or record.ended)
    if record.error:
        fail(span, record.error)
    span.end(nanoseconds(record.ended))
