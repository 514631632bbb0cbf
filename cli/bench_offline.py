"""`fulcrum bench throughput`, `latency` and `ladder`: an engine in this process."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from cli import bench_options, options
from cli.run import clear_errors, engine_in_process
from cli.settings import engine_config, record
from loadtest.datasets import DATASETS
from loadtest.options import COUNT, Number
from loadtest.records import Job
from loadtest.report import save_figures
from loadtest.tables import ladder_table
from loadtest.tokens import LocalTokenizer, token_ids


@click.command()
@options.model
@bench_options.dataset
@click.option("--temperature", type=Number(min=0), default=1.0, help="0 is greedy.")
@bench_options.output_json
@options.revision
@options.tokenizer
@options.engine_settings
def throughput(**params: Any) -> None:
    """Measure MODEL without a server: all prompts at once, each with all its tokens.

    Options of the data set, print-out and result file are those of `vllm bench throughput`.
    """
    with engine_in_process(params) as (llm, path):
        from loadtest.offline import throughput, throughput_text
        from service.tokenizer import Tokenizer

        tokenizer = LocalTokenizer(Tokenizer.load(params["tokenizer"] or path).backend)
        chains = DATASETS[params["dataset"]](bench_options.sampling(params), tokenizer)
        asked = [prompt for chain in chains for prompt in chain.prompts]
        ids = token_ids(tokenizer, [prompt.content for prompt in asked])
        jobs = [Job(tuple(each), prompt.output_len) for each, prompt in zip(ids, asked, strict=True)]
        fields = throughput(llm, jobs, temperature=params["temperature"], seed=params["seed"])
        click.echo(throughput_text(fields))
        about = {"model_id": path.name, "dataset": params["dataset"], "seed": params["seed"]}
        save_figures(about | fields, params["output_json"])


@click.command()
@options.model
@click.option("--batch-size", type=COUNT, default=8, help="Sequences that run together.")
@click.option("--input-len", type=COUNT, default=32, help="Prompt tokens of each.")
@click.option("--output-len", type=COUNT, default=128, help="Tokens generated for each.")
@click.option("--num-iters-warmup", "warmups", type=click.IntRange(min=0), default=10, help="Batches before those.")
@click.option("--num-iters", "iterations", type=COUNT, default=30, help="Batches measured.")
@bench_options.output_json
@options.revision
@options.engine_settings
def latency(**params: Any) -> None:
    """Measure MODEL without a server: one batch of random prompts, again and again.

    Options, print-out and result file are those of `vllm bench latency`.
    """
    with engine_in_process(params) as (llm, path):
        from loadtest.offline import latency, latency_text

        names = ("batch_size", "input_len", "output_len", "warmups", "iterations")
        fields = latency(llm, **{name: params[name] for name in names})
        click.echo(latency_text(fields))
        save_figures({"model_id": path.name} | fields, params["output_json"])


# The ladder turns these itself; plain-torch attention on CUDA has no rungs of its own.
_SWITCHES = ("scheduler", "reserve_full_length", "prefix_cache", "chunked_prefill", "cuda_graphs", "overlap")
_FIXED = {"attention": "auto"}


@click.command()
@options.model
@click.option("--num-prompts", type=COUNT, default=64, help="Requests, all sent at once.")
@click.option("--max-input-len", type=COUNT, default=1024, help="Cuts the prompts' own part.")
@click.option("--max-output-len", type=COUNT, default=512, help="Cuts the answers; every max_tokens.")
@click.option("--prefix-len", type=click.IntRange(min=0), default=128, help="Tokens of the common prefixes.")
@click.option("--prefix-groups", type=COUNT, default=4, help="Prefixes; each prompt begins with one.")
@bench_options.seed
@click.option("--repeat", type=COUNT, default=3, help="Runs of each rung; medians are shown.")
@click.option("--kv-tokens", type=COUNT, show_default="the whole pool", help="KV that a rung may use, in tokens.")
@bench_options.output_json
@options.engine_settings
def ladder(model: str | None, **params: Any) -> None:
    """Run one load on MODEL rung by rung: static batching, then one switch of the engine more on each rung.

    Lengths are those of ShareGPT, ids are random, answers are greedy. Rungs that the device lacks are left out.
    """
    from engine.hub import resolve_model
    from loadtest.ladder import RUNGS, Load, climb

    for switches in RUNGS.values():  # wrong settings are told before anything is loaded
        config = engine_config(params | switches | _FIXED, Path())
    with clear_errors():
        config = replace(config, model=resolve_model(model, progress=sys.stderr.isatty()))
        how = {"repeat": params["repeat"], "kv_tokens": params["kv_tokens"]}
        result = climb(config, record(Load, params), **how, report=partial(click.echo, err=True))
    click.echo(ladder_table(result))
    save_figures({"model_id": model or config.model.stem, **result}, params["output_json"])


ladder.params = [param for param in ladder.params if param.name not in (*_SWITCHES, *_FIXED)]
