"""`fulcrum bench prefix`: the hit rate of the prefix cache, without a model or of a running server."""

import math
from pathlib import Path
from typing import Any

import click

from cli import bench_options
from cli.bench_options import Numbers

_file = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.option("--trace", type=_file, help="Trace with hash_ids, as of --dataset-name prefix-trace.")
@click.option("--chats", type=_file, help="Chats, as of --dataset-name multi-turn: TTFT by turn, cold and warm.")
@click.option("--simulate", is_flag=True, help="No server, no model: scheduler and KV pool alone.")
@click.option("--num-prompts", type=bench_options.count, show_default="all", help="Requests, in the file's order.")
@click.option("--output-len", type=click.IntRange(min=0), default=1, help="Tokens to generate; 0: as the file says.")
@click.option("--trace-block", type=bench_options.length, default=16, help="Tokens for each block of 512.")
@click.option("--concurrency", type=bench_options.count, default=1, help="Requests under way at once.")
@click.option("--page-sizes", type=Numbers(), default="16", help="Tokens in a page; several with --simulate.")
@click.option("--pool-tokens", type=Numbers(), default="inf", help="Tokens in the KV pool; several with --simulate.")
@click.option("--max-num-batched-tokens", type=bench_options.count, default=8192, help="With --simulate.")
@bench_options.server
@bench_options.flush
@bench_options.output_json
def prefix(**params: Any) -> None:
    """Show the prefix cache's hit rate, beside that of an infinite cache and of a least-recently-used one.

    With --simulate also that of vLLM's rules. A cold request is one with a cache salt of its own.
    """
    from loadtest.records import LoadTestError

    if (params["trace"] is None) == (params["chats"] is None):
        raise click.UsageError("give --trace or --chats")
    if params["simulate"] and params["chats"]:
        raise click.UsageError("chats need a server to render them: no --simulate")
    pages, pools = params["page_sizes"], params["pool_tokens"]
    if not all(size >= 1 and size.is_integer() for size in pages) or not all(pool >= 1 for pool in pools):
        raise click.UsageError("--page-sizes are whole numbers, --pool-tokens at least 1 or inf")
    if not params["simulate"] and (len(pages), len(pools)) != (1, 1):
        raise click.UsageError("a running server has one page size and one pool")
    page_sizes = [int(size) for size in pages]
    pool_tokens = [None if math.isinf(pool) else int(pool) for pool in pools]
    try:
        run = _simulated if params["simulate"] else _served
        fields = run(params, page_sizes, pool_tokens)
        names = ("num_prompts", "output_len", "trace_block", "concurrency", "max_num_batched_tokens")
        source = params["trace"] or params["chats"]
        about = {"kind": "prefix", "simulated": params["simulate"], "file": source.name}
        bench_options.write_json(params["output_json"], about | {name: params[name] for name in names} | fields)
    except LoadTestError as error:
        raise click.ClickException(str(error)) from error


def _simulated(params: dict[str, Any], page_sizes: list[int], pools: list[int | None]) -> dict[str, Any]:
    from loadtest.datasets import Sampling
    from loadtest.prefix import simulate
    from loadtest.tables import ROWS, rows_table
    from loadtest.trace import read_trace

    sampling = Sampling(params["trace"], params["num_prompts"] or 1 << 40, block=params["trace_block"])
    rows = simulate(
        read_trace(sampling, max_tokens=params["output_len"]),
        page_sizes=page_sizes,
        pools=pools,
        concurrency=params["concurrency"],
        max_batched_tokens=params["max_num_batched_tokens"],
    )
    click.echo(rows_table(rows, ROWS["page_sizes"]))
    return {"rows": rows}


def _served(params: dict[str, Any], page_sizes: list[int], pools: list[int | None]) -> dict[str, Any]:
    from loadtest.datasets import Sampling
    from loadtest.prefix_served import served_chats, served_trace
    from loadtest.serve import LoadTest
    from loadtest.tables import ROWS, rows_table

    chats = params["trace"] is None
    asked = params | {"ignore_eos": True}
    if chats and params["backend"] == "openai":
        asked["backend"] = "openai-chat"
    test = LoadTest(
        target=bench_options.target(asked),
        dataset="multi-turn" if chats else "prefix-trace",
        sampling=Sampling(
            params["trace"] or params["chats"],
            params["num_prompts"] or 1 << 40,
            output_len=params["output_len"] or None,
            shuffle=False,
            block=params["trace_block"],
        ),
        max_concurrency=params["concurrency"],
    ).prepared()

    def flush() -> None:
        bench_options.flush_cache(params, test.target)

    if not chats:
        flush()
        row = served_trace(test, page_sizes[0], pools[0])
        click.echo(rows_table([row], ROWS["page_sizes"]))
        return {"model_id": test.target.model, "rows": [row]}
    row = served_chats(test, page_sizes[0], pools[0], flush)
    turns = row.pop("turns")
    click.echo(f"{rows_table(turns, ROWS['turns'])}\n\n{rows_table([row], ROWS['page_sizes'])}")
    return {"model_id": test.target.model, "rows": [row], "turns": turns}
