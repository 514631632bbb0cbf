"""`fulcrum bench prefix`: the hit rate of the prefix cache, without a model or of a running server."""

import math
from typing import Any

import click

from cli import bench_options
from cli.options import existing_file
from cli.settings import Params
from loadtest.datasets import Sampling
from loadtest.options import COUNT, Listed, Number
from loadtest.prefix_served import served
from loadtest.report import save_figures
from loadtest.serve import LoadTest
from loadtest.tables import ROWS, rows_table
from loadtest.trace import read_trace


@click.command()
@click.option("--trace", type=existing_file, help="Trace with hash_ids, as of --dataset-name prefix-trace.")
@click.option(
    "--chats", type=existing_file, help="Chats, as of --dataset-name multi-turn: TTFT by turn, cold and warm."
)
@click.option("--simulate", is_flag=True, help="No server, no model: scheduler and KV pool alone.")
@click.option("--num-prompts", type=COUNT, show_default="all", help="Requests, in the file's order.")
@click.option("--output-len", type=click.IntRange(min=0), default=1, help="Tokens to generate; 0: as the file says.")
@click.option("--trace-block", type=COUNT, default=16, help="Tokens for each block of 512.")
@click.option("--concurrency", type=COUNT, default=1, help="Requests under way at once.")
@click.option("--page-sizes", type=Listed(COUNT), default="16", help="Tokens in a page; several with --simulate.")
@click.option(
    "--pool-tokens",
    type=Listed(Number(min=1, infinite=True)),
    default="inf",
    help="Tokens in the KV pool; several with --simulate.",
)
@click.option("--max-num-batched-tokens", type=COUNT, default=8192, help="With --simulate.")
@bench_options.server
@bench_options.flush
@bench_options.output_json
def prefix(**params: Any) -> None:
    """Show the prefix cache's hit rate, beside that of an infinite cache and of a least-recently-used one.

    With --simulate also that of vLLM's rules. A cold request is one with a cache salt of its own.
    """
    trace, chats, simulate = params["trace"], params["chats"], params["simulate"]
    page_sizes = params["page_sizes"]
    pools = [None if math.isinf(pool) else int(pool) for pool in params["pool_tokens"]]
    if (trace is None) == (chats is None):
        raise click.UsageError("give --trace or --chats")
    if simulate and chats:
        raise click.UsageError("chats need a server to render them: no --simulate")
    if not simulate and (len(page_sizes), len(pools)) != (1, 1):
        raise click.UsageError("a running server has one page size and one pool")
    sampling = Sampling(
        trace or chats,
        params["num_prompts"] or 1 << 40,
        output_len=params["output_len"] or None,
        shuffle=False,
        block=params["trace_block"],
    )
    if simulate:
        from loadtest.prefix import simulate as simulated

        how = {"concurrency": params["concurrency"], "max_batched_tokens": params["max_num_batched_tokens"]}
        fields: dict[str, Any] = {"rows": simulated(read_trace(sampling), page_sizes, pools, **how)}
    else:
        fields = _served(params, sampling, page_sizes[0], pools[0])
    if "turns" in fields:
        click.echo(rows_table(fields["turns"], ROWS["turns"]) + "\n")
    click.echo(rows_table(fields["rows"], ROWS["page_sizes"]))
    names = ("num_prompts", "output_len", "trace_block", "concurrency", "max_num_batched_tokens")
    about = {"kind": "prefix", "simulated": simulate, "file": (trace or chats).name}
    save_figures(about | {name: params[name] for name in names} | fields, params["output_json"])


def _served(params: Params, sampling: Sampling, page_size: int, pool: int | None) -> dict[str, Any]:
    asked = {**params, "ignore_eos": True}
    if params["chats"] and params["backend"] == "openai":
        asked["backend"] = "openai-chat"
    target, limit = bench_options.target(asked), params["concurrency"]
    dataset = "multi-turn" if params["chats"] else "prefix-trace"
    test = LoadTest(target=target, dataset=dataset, sampling=sampling, max_concurrency=limit).prepared()
    fields = served(test, page_size, pool, lambda: bench_options.flush_cache(params, test.target))
    return {"model_id": test.target.model, **fields}
