"""Prints what instructor sees at the gateway. Arguments: URL, GUARDED_URL, MODEL."""

import json
import logging
import sys

import instructor
import openai
from instructor.core import InstructorRetryException
from pydantic import BaseModel

url, guarded, model = sys.argv[1:]
logging.disable()  # it logs each refusal


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int


def ask(
    text="Where is it warm?", url=url, model=model, mode=instructor.Mode.TOOLS, kind=Person, stream=False, **fields
):
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)
    create = client.create_partial if stream and kind else client.create
    fields |= {"stream": stream} if not kind else {}
    messages = [{"role": "user", "content": text}]
    return create(model=model, messages=messages, response_model=kind, max_retries=0, **fields)


def refusal(**wrong):
    try:
        return [str(ask(**wrong))]
    except InstructorRetryException as error:
        cause = error.__cause__
        return [f"{type(error).__name__} of {type(cause).__name__}", cause.status_code, cause.param]


whole = ask(kind=None, max_tokens=5)
chunks = list(ask(kind=None, stream=True, stream_options={"include_usage": True}))
modes = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)
people = [ask(mode=mode) for mode in modes] + [list(ask(mode=mode, stream=True))[-1] for mode in modes]
seen = {
    "chat": [whole.choices[0].message.content],
    "usage": [[each.usage.prompt_tokens, each.usage.completion_tokens] for each in (whole, chunks[-1])],
    "stream": [[text for chunk in chunks for choice in chunk.choices if (text := choice.delta.content)]],
    "schema": [person.model_dump() for person in people],
    "refusals": [
        refusal(url=guarded),
        refusal(model="gpt-4o"),
        refusal(temperature=3.0),
        refusal(text="busy"),
        refusal(text="long"),
    ],
}
json.dump(seen, sys.stdout)
