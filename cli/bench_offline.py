"""`fulcrum bench throughput` and `latency`: an engine in this process."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli import bench_options, options

if TYPE_CHECKING:
    from engine import LLM
    from loadtest.records import Message
    from loadtest.tokens import LocalTokenizer

Params = dict[str, Any]


@click.command()
@options.model
@bench_options.dataset
@click.option("--temperature", type=bench_options.Number(min=0), default=1.0, help="0 is greedy.")
@click.option("--pairs", type=bench_options.count, help="With --speculative: so many runs with guesses and without.")
@bench_options.output_json
@options.together(options.revision, options.tokenizer, options.engine_settings)
def throughput(**params: Any) -> None:
    """Measure MODEL without a server: all prompts at once, each with all its tokens.

    Options of the data set, print-out and result file are those of `vllm bench throughput`.
    """
    if params["pairs"] is not None and params["speculative"] == "off":
        raise click.UsageError("--pairs measures --speculative ngram, which is off")
    with _engine(params) as (llm, path):
        from loadtest.datasets import DATASETS
        from loadtest.offline import speculation, speculation_text, throughput, throughput_text, token_prompts

        tokenizer = cache(lambda: _tokenizer(params["tokenizer"] or path))
        chains = DATASETS[params["dataset_name"]](bench_options.sampling(params), tokenizer)
        prompts = token_prompts(chains, tokenizer, lambda chat: _rendered(params["tokenizer"] or path, path, chat))
        sampling = {"temperature": params["temperature"], "seed": params["seed"]}
        if params["pairs"] is None:
            fields = throughput(llm, prompts, **sampling)
            click.echo(throughput_text(fields))
        else:
            fields = speculation(llm, prompts, pairs=params["pairs"], **sampling)
            click.echo(speculation_text(fields))
        about = {"model_id": path.name, "dataset": params["dataset_name"], "seed": params["seed"]}
        bench_options.write_json(params["output_json"], about | fields)


@click.command()
@options.model
@click.option("--batch-size", type=bench_options.count, default=8, help="Sequences that run together.")
@click.option("--input-len", type=bench_options.length, default=32, help="Prompt tokens of each.")
@click.option("--output-len", type=bench_options.length, default=128, help="Tokens generated for each.")
@click.option("--num-iters-warmup", type=click.IntRange(min=0), default=10, help="Batches before the measurement.")
@click.option("--num-iters", type=bench_options.count, default=30, help="Batches measured.")
@bench_options.output_json
@options.together(options.revision, options.engine_settings)
def latency(**params: Any) -> None:
    """Measure MODEL without a server: one batch of random prompts, again and again.

    Options, print-out and result file are those of `vllm bench latency`.
    """
    with _engine(params) as (llm, path):
        from loadtest.offline import latency, latency_text

        fields = latency(
            llm,
            batch_size=params["batch_size"],
            input_len=params["input_len"],
            output_len=params["output_len"],
            warmups=params["num_iters_warmup"],
            iterations=params["num_iters"],
        )
        click.echo(latency_text(fields))
        bench_options.write_json(params["output_json"], {"model_id": path.name} | fields)


@contextmanager
def _engine(params: Params) -> "Iterator[tuple[LLM, Path]]":
    """The engine that the options ask for, and the model's path; what a person can mend becomes one line."""
    from cli import settings

    settings.engine_config(params, Path())  # wrong settings are told before anything is loaded
    from cli.run import Failed, clear_errors
    from engine import LLM
    from engine.hub import resolve_model
    from engine.request import RequestRejected
    from loadtest.records import LoadTestError

    progress = sys.stderr.isatty()
    try:
        with clear_errors():
            path = resolve_model(params["model"], revision=params["revision"], progress=progress)
            further = asdict(settings.engine_config(params, path)) | {"model": path}
            yield LLM(progress=progress, **further), path
    except (LoadTestError, RequestRejected) as error:
        raise Failed(str(error)) from error


def _rendered(tokenizer_path: Path, model: Path, chat: "list[Message]") -> list[int]:
    """A chat's token ids, by the model's template."""
    from service.model import chat_template
    from service.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(tokenizer_path)
    return tokenizer.encode_rendered_chat(chat_template(model, tokenizer).render(chat))


def _tokenizer(path: Path) -> "LocalTokenizer":
    from loadtest.tokens import LocalTokenizer
    from service.tokenizer import Tokenizer

    return LocalTokenizer(Tokenizer.load(path).backend)
