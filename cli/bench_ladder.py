"""`fulcrum bench ladder`: what each idea of serving is worth, on an engine in this process."""

import sys
from typing import Any

import click

from cli import bench_options, options

# The ladder turns these itself; plain-torch attention on CUDA has no rungs of its own.
_SWITCHES = ("scheduler", "reserve_full_length", "prefix_cache", "chunked_prefill", "cuda_graphs", "overlap")
_FIXED = {"attention": "auto"}


@click.command()
@options.model
@click.option("--num-prompts", type=bench_options.count, default=64, help="Requests, all sent at once.")
@click.option("--max-input-len", type=bench_options.length, default=1024, help="Cuts the prompts' own part.")
@click.option("--max-output-len", type=bench_options.length, default=512, help="Cuts the answers; every max_tokens.")
@click.option("--prefix-len", type=click.IntRange(min=0), default=128, help="Tokens of the common prefixes.")
@click.option("--prefix-groups", type=bench_options.count, default=4, help="Prefixes; each prompt begins with one.")
@click.option("--seed", type=bench_options.seed, default=0, help="Of lengths and ids.")
@click.option("--repeat", type=bench_options.count, default=3, help="Runs of each rung; medians are shown.")
@click.option(
    "--kv-tokens", type=bench_options.count, show_default="the whole pool", help="KV that a rung may use, in tokens."
)
@bench_options.output_json
@options.engine_settings
def ladder(model: str | None, **params: Any) -> None:
    """Run one load on MODEL rung by rung: static batching, then one switch of the engine more on each rung.

    Lengths are those of ShareGPT, ids are random, answers are greedy. Rungs that the device lacks are left out.
    """
    from cli.settings import engine_config
    from engine.hub import resolve_model
    from engine.model.errors import ModelError
    from loadtest.ladder import BASE, Load, climb
    from loadtest.records import LoadTestError
    from loadtest.tables import ladder_table

    load = Load(
        count=params["num_prompts"],
        max_input_len=params["max_input_len"],
        max_output_len=params["max_output_len"],
        prefix_len=params["prefix_len"],
        prefix_groups=params["prefix_groups"],
        seed=params["seed"],
    )
    try:
        config = engine_config(params | BASE | _FIXED, resolve_model(model, progress=sys.stderr.isatty()))
        result = climb(
            config,
            load,
            repeat=params["repeat"],
            kv_tokens=params["kv_tokens"],
            report=lambda line: click.echo(line, err=True),
        )
        click.echo(ladder_table(result))
        bench_options.write_json(params["output_json"], {"model_id": model or config.model.stem, **result})
    except (LoadTestError, ModelError, ValueError) as error:
        raise click.ClickException(str(error)) from error


ladder.params = [param for param in ladder.params if param.name not in (*_SWITCHES, *_FIXED)]
