"""The grammar of a chat's answer: what was asked for, beside the tool calls and behind the reasoning that may come.

Knows no request and compiles nothing.
"""

import json

from service.grammar_worker import Constraint, alternatives
from service.parsers.forced import Form, behind_reasoning, calls_form, free_form, json_form
from service.parsers.output_parser import Reading


def output_grammar(constraint: Constraint | None, reading: Reading | None) -> Constraint | None:
    """What the whole output must follow; None where it is free.

    Args:
        constraint: what the answer's content must follow. None where a call must come.
        reading: how the output will be read.
    """
    if reading is None:
        return constraint
    form = reading.forced
    if constraint is not None:
        form = _form(constraint)
        # Calls in place of the content; a marker that is a special token can be part of no grammar.
        callable_now = reading.tools is not None and not reading.tools.prefill
        if form is None or not (callable_now or reading.thinks):
            return constraint
        if reading.tools is not None and callable_now:
            calls = calls_form(reading.tools, reading.arguments, parallel=reading.parallel)
            form = {"type": "or", "elements": [form, calls]}
    elif form is None and reading.tools is not None and reading.strict:
        form = free_form(reading.tools, reading.arguments)
    if form is None:
        return None
    if reading.reasoning is not None and reading.thinks:
        form = behind_reasoning(form, reading.reasoning, opened=reading.opened)
    return Constraint("structural_tag", json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False))


def _form(constraint: Constraint) -> Form | None:
    """A constraint as a part of a structural tag; None of a schema that is no JSON, which its compilation will tell."""
    match constraint.kind:
        case "json_schema":
            try:
                return json_form(json.loads(constraint.text))
            except (ValueError, RecursionError):
                return None
        case "json_object":
            return json_form({"type": "object"})
        case "regex":
            return {"type": "regex", "pattern": constraint.text}
        case "grammar":
            return {"type": "grammar", "grammar": constraint.text}
        case "choices":
            return {"type": "grammar", "grammar": alternatives(json.loads(constraint.text))}
        case kind:
            raise ValueError(f"unknown kind of constraint {kind!r}")
