"""Clients that many programs use, each as its users call it: answers, streams, schemas, tools, refusals.

The engine's answers are known, and every client has to see them.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc
import openai
import pytest
from grpc_status import rpc_status
from pydantic import BaseModel

from service.validate import window_exceeded

QUESTION = "Where is it warm?"
PERSON = '{"name": "Ada", "age": 36}'
CITY = '{"city": "Paris"}'
# What a client has to see, each time that it asks.
KNOWN = {
    "chat": "Hello world",
    "usage": [5, 3],
    "stream": ["Hello", " world"],
    "schema": json.loads(PERSON),
    "tool": "It is 18 degrees in Paris",
}

Seen = dict[str, list[Any]]


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int


class City(BaseModel):
    """Some place."""

    city: str


def weather(city: str) -> str:
    """Tells the weather of a city."""
    return f"18 degrees in {city}"


class Place(NamedTuple):
    """Where clients go; the guarded gateway does not know their key."""

    url: str
    guarded: str
    model: str


@pytest.fixture
def place(gateway, guarded, engine, kit):
    """Two gateways, whose engine's answer depends on what it is asked."""

    async def script(request, context):
        last = request.chat.messages[-1]
        asked = "".join(part.text for part in last.content)
        if request.model != kit.MODEL:
            answer = kit.refuses(grpc.StatusCode.NOT_FOUND, "no such model", kit.reason("MODEL_NOT_FOUND"))
        elif asked == "busy":
            answer = kit.refuses(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", kit.reason("QUEUE_FULL"), kit.retry(1))
        elif asked == "long":  # in the service's own words, by which some clients know it
            refusal = window_exceeded("chat", 2048, "the prompt has 3000", prompt_tokens=3000)
            await context.abort_with_status(rpc_status.to_status(refusal.status()))
        elif last.role == "tool":
            assert last.tool_call_id == request.chat.messages[-2].tool_calls[0].id == "call_1"
            answer = kit.says("It is ", asked)
        elif request.json_schema:
            assert json.loads(request.json_schema)["properties"].keys() == {"name", "age"}
            answer = kit.says(PERSON[:9], PERSON[9:])
        elif request.chat.tools:
            answer = calls(kit, request.chat.tools[0])
        else:
            answer = kit.says("Hello", " world")
        async for event in answer(request, context):
            yield event

    engine.script = script
    return Place(f"{gateway}/v1", f"{guarded.url}/v1", kit.MODEL)


def calls(kit, tool):
    """A script: a call of the tool, in pieces, after reasoning."""
    fields = json.loads(tool.parameters_json)["properties"].keys()
    arguments = {frozenset({"city"}): CITY, frozenset({"name", "age"}): PERSON}[frozenset(fields)]
    pieces = [(0, "call_1", tool.name, ""), (0, "", "", arguments[:5]), (0, "", "", arguments[5:])]
    return kit.plays(kit.delta(reasoning="Hm"), *(kit.delta(calls=[piece]) for piece in pieces))


def refusals(place: Place, ask: Callable[..., Any], kind: type[Any] = openai.APIStatusError, **wrong: Any) -> list[Any]:
    """Class, status and field of the errors in the order of REFUSED; `wrong`: a field that the client lets pass."""
    found = []
    texts = ({"text": "busy"}, {"text": "long"})
    for fields in ({"url": place.guarded}, {"model": "gpt-4o"}, wrong or {"temperature": 3.0}, *texts):
        with pytest.raises(kind) as caught:
            ask(**fields)
        error = caught.value
        param = error.param if isinstance(error, openai.APIError) else error.body["param"]
        found.append([caught.type.__name__, error.status_code, param])
    return found


def official(place: Place) -> Seen:
    """The openai client; what it parsed goes back with what it parsed."""
    tools = [openai.pydantic_function_tool(City, name="weather")]
    question = {"role": "user", "content": QUESTION}

    def chat(url=place.url):
        return openai.OpenAI(base_url=url, api_key="none", max_retries=0).chat.completions

    def ask(text=QUESTION, url=place.url, model=place.model, **fields):
        return chat(url).create(model=model, messages=[{"role": "user", "content": text}], **fields)

    def parse(stream, messages=(question,), **fields):
        body = {"model": place.model, "messages": messages, **fields}
        if not stream:
            return chat().parse(**body).choices[0].message
        with chat().stream(**body) as events:
            return events.get_final_completion().choices[0].message

    def loop(called):
        (call,) = called.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": weather(call.function.parsed_arguments.city)}
        return parse(stream=False, messages=[question, called, result], tools=tools).content

    whole = ask(max_tokens=5)
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    forms = [parse(stream, response_format=Person) for stream in (False, True)]
    follow = [parse(stream=False, messages=[question, form, question]).content for form in forms]
    return {
        "chat": [whole.choices[0].message.content, *follow],
        "usage": [[each.usage.prompt_tokens, each.usage.completion_tokens] for each in (whole, chunks[-1])],
        "stream": [[text for chunk in chunks for choice in chunk.choices if (text := choice.delta.content)]],
        "schema": [form.parsed.model_dump() for form in forms],
        "tool": [loop(parse(stream, tools=tools, parallel_tool_calls=False)) for stream in (False, True)],
        "refusals": refusals(place, ask),
    }


def litellm(place: Place) -> Seen:
    import litellm

    litellm.suppress_debug_info = True
    question = {"role": "user", "content": QUESTION}
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    tools = [{"type": "function", "function": function}]

    def ask(text="", url=place.url, model=place.model, messages=(question,), **fields):
        messages = [{"role": "user", "content": text}] if text else list(messages)
        return litellm.completion(f"openai/{model}", messages, api_base=url, api_key="none", max_retries=0, **fields)

    def gathered(stream):
        return litellm.stream_chunk_builder(list(stream))

    def loop(called):
        """The answer to a tool's result; the call goes back as it came."""
        message = called.choices[0].message
        (call,) = message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": weather(**json.loads(call.function.arguments))}
        return ask(messages=[question, message, result], tools=tools).choices[0].message.content

    whole = ask(max_tokens=5)
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    forms = (ask(response_format=Person), gathered(ask(response_format=Person, stream=True)))
    return {
        "chat": [whole.choices[0].message.content],
        "usage": [[each.usage.prompt_tokens, each.usage.completion_tokens] for each in (whole, chunks[-1])],
        "stream": [[text for chunk in chunks for choice in chunk.choices if (text := choice.delta.content)]],
        "schema": [json.loads(form.choices[0].message.content) for form in forms],
        "tool": [loop(ask(tools=tools, parallel_tool_calls=False)), loop(gathered(ask(tools=tools, stream=True)))],
        "refusals": refusals(place, ask),
    }


def langchain(place: Place) -> Seen:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    def chat(url=place.url, model=place.model, **fields):
        return ChatOpenAI(base_url=url, api_key="none", model=model, max_retries=0, **fields)

    def ask(text=QUESTION, **fields):
        return chat(**fields).invoke(text)

    def gathered(chunks):
        return sum(chunks[1:], chunks[0])

    def loop(called):
        (call,) = called.tool_calls
        result = ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
        return tools.invoke([HumanMessage(QUESTION), called, result]).content

    tools = chat().bind_tools([weather], parallel_tool_calls=False)
    whole = chat(max_tokens=5).invoke([("system", "Be brief."), ("human", QUESTION)])
    chunks = list(chat(stream_usage=True).stream(QUESTION))
    usages = [each.usage_metadata for each in (whole, gathered(chunks))]
    forms = [chat().with_structured_output(Person, method=each) for each in ("json_schema", "function_calling")]
    return {
        "chat": [whole.content],
        "usage": [[usage["input_tokens"], usage["output_tokens"]] for usage in usages],
        "stream": [[chunk.content for chunk in chunks if chunk.content]],
        "schema": [form.invoke(QUESTION).model_dump() for form in forms],
        "tool": [loop(tools.invoke(QUESTION)), loop(gathered(list(tools.stream(QUESTION))))],
        "refusals": refusals(place, ask),
    }


def pydantic_ai(place: Place) -> Seen:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.exceptions import ModelHTTPError
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def run(text, url, model, settings, stream, fields):
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            chat = OpenAIChatModel(model, provider=OpenAIProvider(openai_client=client))
            agent = Agent(chat, instructions="Be brief.", model_settings=settings, **fields)
            if not stream:
                return await agent.run(text)
            async with agent.run_stream(text) as streamed:
                pieces = [piece async for piece in streamed.stream_text(delta=True, debounce_by=None)]
            return pieces, streamed.usage

    def ask(text=QUESTION, url=place.url, model=place.model, stream=False, tools=(), output_type=str, **settings):
        return asyncio.run(run(text, url, model, settings, stream, {"tools": tools, "output_type": output_type}))

    whole = ask(max_tokens=5)
    pieces, usage = ask(stream=True)
    called, _ = ask(tools=[weather], stream=True)
    return {
        "chat": [whole.output],
        "usage": [[each.input_tokens, each.output_tokens] for each in (whole.usage, usage)],
        "stream": [pieces],
        "schema": [ask(output_type=each).output.model_dump() for each in (NativeOutput(Person), Person)],
        "tool": [ask(tools=[weather], parallel_tool_calls=False).output, "".join(called)],
        "refusals": refusals(place, ask, ModelHTTPError),
    }


def llm(place: Place) -> Seen:
    import llm

    served = {
        (place.url, place.model): "served",
        (place.guarded, place.model): "guarded",
        (place.url, "gpt-4o"): "gone",
    }
    models = [
        {"model_id": id, "model_name": name, "api_base": url, "supports_schema": True, "supports_tools": True}
        for (url, name), id in served.items()
    ]
    (llm.user_dir() / "extra-openai-models.yaml").write_text(json.dumps(models))  # which is YAML
    model = llm.get_model("served")

    def ask(text=QUESTION, url=place.url, model=place.model, **fields):
        return llm.get_model(served[url, model]).prompt(text, **fields).text()

    whole = model.prompt(QUESTION, system="Be brief.", stream=False, max_tokens=5)
    stream = model.prompt(QUESTION)
    return {
        "chat": [whole.text()],
        "stream": [list(stream)],
        "usage": [[each.usage().input, each.usage().output] for each in (whole, stream)],
        "schema": [json.loads(ask(schema=Person, stream=each)) for each in (True, False)],
        "tool": [model.chain(QUESTION, tools=[weather], stream=each).text() for each in (True, False)],
        "refusals": refusals(place, ask, max_tokens=0),
    }


# A wrong key, model and field, a full queue, and a prompt beyond the window, by the openai client's names.
REFUSED = [
    ["AuthenticationError", 401, None],
    ["NotFoundError", 404, "model"],
    ["BadRequestError", 400, "temperature"],
    ["RateLimitError", 429, None],
    ["BadRequestError", 400, "messages"],
]


def named(*names: str) -> list[Any]:
    """The refusals, where a client has its own names for them."""
    return [[name, *rest] for name, (_, *rest) in zip(names, REFUSED, strict=True)]


def check(seen: Seen, refused: list[Any], engine: Any, attempts: int = 1) -> None:
    assert seen.pop("refusals") == refused
    assert {name: [KNOWN[name]] * len(values) for name, values in seen.items()} == seen
    assert {"chat", "usage", "stream", "schema"} <= {name for name, values in seen.items() if values}
    assert engine.calls[0].request.stopping.max_tokens == 5
    assert sum(call.request.chat.messages[-1].content[0].text == "busy" for call in engine.calls) == attempts


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the clients' own
@pytest.mark.parametrize(
    ("client", "refused"),
    [
        (official, REFUSED),
        (
            litellm,
            [
                REFUSED[0],
                ["NotFoundError", 404, None],
                *REFUSED[2:4],
                ["ContextWindowExceededError", 400, None],
            ],
        ),
        (
            langchain,
            named(
                "OpenAIAuthenticationError",
                "OpenAIModelNotFoundError",
                "OpenAIInvalidRequestError",
                "OpenAIRateLimitError",
                "OpenAIInvalidRequestError",
            ),
        ),
        (
            pydantic_ai,
            named(
                "ModelAuthenticationError",
                "ModelNotFoundError",
                "ModelRequestRejectedError",
                "ModelRateLimitError",
                "ModelContextWindowExceededError",
            ),
        ),
        (llm, [*REFUSED[:2], ["BadRequestError", 400, "max_tokens"], *REFUSED[3:]]),
    ],
)
def test_python(place, engine, client, refused, monkeypatch, tmp_path):
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    check(client(place), refused, engine, attempts=3 if client is llm else 1)  # llm cannot be told not to repeat


def program(command: list[Any], place: Place) -> Seen:
    """What a client's program sees: it prints it."""
    done = subprocess.run([*command, *place], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_instructor(place, engine, instructor_path, kit):
    command = ["env", f"PYTHONPATH={instructor_path}", sys.executable, kit.ROOT / "tests/clients/instructor_client.py"]
    check(program(command, place), named(*[f"InstructorRetryException of {name}" for name, *_ in REFUSED]), engine)


@pytest.mark.parametrize(("client", "refused"), [("openai", REFUSED), ("ai", named(*["AI_APICallError"] * 5))])
def test_node(place, engine, node_clients, client, refused):
    check(program(["node", node_clients / f"{client}.mjs"], place), refused, engine)
