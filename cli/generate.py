"""`fulcrum generate`: one answer in the terminal, from an engine in this process.

Prompt, defaults, limits and text are the service's own, so that the answer is the one that a server would give.
"""

import asyncio

import click

from cli.run import Failed, engine_in_process
from cli.settings import Params
from cli.terminal import fields, say, system
from engine.llm import LLM
from engine.messages import SequenceOutput
from fulcrum.client import chat_request
from fulcrum.v1.inference_pb2 import GenerateRequest, GenerateResponse
from service.auth import Caller
from service.choice import Choice
from service.config import ServiceConfig
from service.errors import ApiError
from service.model import ServedModel
from service.parsers.output_parser import OutputParser
from service.validate import fit, plan


def generate_text(text: str, params: Params) -> None:
    """Streams the answer to standard output. Raises Failed, ConfigError."""
    with engine_in_process(params) as (llm, path):
        served = ServedModel.load(
            ServiceConfig(path, (path.name,), chat_template=params["chat_template"], tokenizer=params["tokenizer"])
        )
        try:
            _stream(text, params, served, llm)
        except ApiError as error:
            raise Failed(str(error)) from error
        finally:
            served.prompts.close()


def _stream(text: str, params: Params, served: ServedModel, llm: LLM) -> None:
    if params["raw"]:
        request = GenerateRequest(text=text, **fields(params))
    else:
        request = chat_request([*system(params), ("user", text)], **fields(params))
    asked = plan(request, llm.info, served.defaults, Caller("", None))
    window = llm.info.max_model_len
    if params["raw"]:
        prompt = asyncio.run(served.prompts.text(text, add_special_tokens=True, window=window))
    else:
        prompt = asyncio.run(served.prompts.chat(request.chat, window=window)).ids
    job = fit(asked, prompt, "text" if params["raw"] else "chat", llm.info)
    stream = served.text_stream(asked, after_prompt=params["raw"])
    choice = Choice(0, asked, stream, served.prompts.tokenizer, OutputParser(None, None))
    for piece in llm.stream(prompt, job.params):
        for response in choice.take(SequenceOutput("", piece.index, piece.token_ids, piece.finish)):
            say(GenerateResponse.FromString(response).delta.text)
        if choice.finish is not None:  # a stop string may end it before the engine does
            break
    click.echo()
