"""The ladder on a tiny model: order of the rungs, one switch each, equal answers, and what each does to the numbers."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from cli.main import main
from engine.config import EngineConfig
from loadtest import ladder
from loadtest.ladder import RUNGS, Load, climb
from loadtest.records import LoadTestError

CPU_RUNGS = [
    "static batching",
    "continuous batching, KV reserved at full length",
    "+ paged allocation",
    "+ prefix cache",
    "+ chunked prefill",
]
LOAD = Load(num_prompts=12, max_input_len=20, max_output_len=48, prefix_len=32, prefix_groups=1, seed=0)
KV_TOKENS = 384


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose weights are large enough for its answers to depend on all that was read."""
    import transformers

    folder = tmp_path_factory.mktemp("ladder")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=3,
        pad_token_id=None,
    )
    oracle = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in oracle.named_parameters():
            if not name.endswith("norm.weight"):
                weight.normal_(0, 0.2)
    oracle.save_pretrained(folder)
    return folder


def settings(model: Path) -> EngineConfig:
    return EngineConfig(model=model, dtype="float32", device="cpu", threads=1, memory_budget=4 << 20, max_num_seqs=8)


@pytest.fixture(scope="module")
def result(model: Path) -> dict:
    return climb(settings(model), LOAD, repeat=2, kv_tokens=KV_TOKENS, report=lambda line: None)


@pytest.fixture
def rows(result: dict) -> dict[str, dict]:
    return {row["rung"]: row for row in result["rungs"]}


def test_each_rung_turns_one_switch_and_the_last_is_the_engine_s_default():
    for below, above in pairwise(RUNGS):
        assert sum(RUNGS[below][name] != RUNGS[above][name] for name in RUNGS[below]) == 1, above
    default = EngineConfig(model=Path("m"))
    assert replace(default, **RUNGS["+ overlap"]) == default


def test_rungs_are_in_order_and_those_of_cuda_are_named_as_left_out(result):
    assert [row["rung"] for row in result["rungs"]] == CPU_RUNGS
    assert result["left_out"] == ["+ CUDA graphs", "+ overlap"]
    assert result["rungs"][0]["switches"]["scheduler"] == "static"


def test_every_rung_gives_the_same_answers(result):
    """Greedy, in float32: the answers of static batching are those of all."""
    assert [row["equal_answers"] for row in result["rungs"]] == [LOAD.num_prompts] * len(CPU_RUNGS)


def test_answers_are_transformers(model):
    import transformers

    jobs = LOAD.jobs(160)
    core, info = ladder.build_core(settings(model), progress=False)
    scheduler = ladder._scheduler(settings(model), "+ overlap", info, info.num_pages)
    answers = ladder.run(core, scheduler, jobs, LOAD)[1]
    oracle = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    for job, answer in list(zip(jobs, answers, strict=True))[:4]:
        assert len(answer) == job.output_len
        with torch.no_grad():
            logits = oracle(torch.tensor([[*job.prompt, *answer]])).logits[0]
        assert answer == logits[len(job.prompt) - 1 : -1].argmax(-1).tolist()


def test_paging_runs_more_sequences_in_the_same_memory(rows):
    """24 pages of 16 tokens; prompts of 36 to 52 tokens and max_tokens 48 reserve 6 or 7 pages, so that 3 or 4 run."""
    reserved, paged = (rows[name] for name in CPU_RUNGS[1:3])
    assert reserved["peak_running"] in (3, 4)
    assert rows["static batching"]["peak_running"] in (3, 4)
    assert paged["peak_running"] > reserved["peak_running"]
    assert rows["+ prefix cache"]["peak_running"] >= paged["peak_running"]
    assert {row["kv_tokens"] for row in rows.values()} == {KV_TOKENS}


def test_static_batching_takes_more_steps(rows):
    """Each of its batches runs until its last answer has ended."""
    assert rows["static batching"]["steps"] > rows[CPU_RUNGS[1]]["steps"] > rows["+ paged allocation"]["steps"]


def test_the_prefix_cache_finds_the_common_prefix(rows):
    assert rows["+ paged allocation"]["prefix_hit_tokens"] == 0
    assert rows["+ prefix cache"]["prefix_hit_tokens"] == 32 * (LOAD.num_prompts - 1), (
        "all but the first find its two pages"
    )


def test_factors_are_ratios_of_the_medians(result):
    rates = [row["request_throughput"] for row in result["rungs"]]
    for i, row in enumerate(result["rungs"]):
        assert row["factor_before"] == pytest.approx(rates[i] / rates[max(0, i - 1)])
        assert row["factor_first"] == pytest.approx(rates[i] / rates[0])
        assert row["request_throughput_min"] <= rates[i] <= row["request_throughput_max"]
        assert 0 < row["p50_ttft_ms"] <= row["p99_ttft_ms"]


def test_the_load_is_a_function_of_its_seed():
    jobs = LOAD.jobs(160)
    assert jobs == LOAD.jobs(160) != replace(LOAD, seed=1).jobs(160)
    assert len({job.prompt[:32] for job in jobs}) == 1
    assert all(36 <= len(job.prompt) <= 52 and 4 <= job.output_len <= 48 for job in jobs)
    many = replace(LOAD, num_prompts=4000, prefix_len=0, max_input_len=1024, max_output_len=1024).jobs(10)
    lengths = sorted(len(job.prompt) for job in many)
    assert lengths[2000] == pytest.approx(96, rel=0.15), "the median of ShareGPT's prompts"
    assert sum(job.output_len for job in many) / 4000 == pytest.approx(206, rel=0.05), "the mean of its answers"


def test_a_load_beyond_the_pool_is_refused_by_name(model):
    with pytest.raises(LoadTestError, match="the KV pool holds 64"):
        climb(settings(model), LOAD, repeat=1, kv_tokens=64, report=lambda line: None)
    with pytest.raises(LoadTestError, match="tokens of KV asked for"):
        climb(settings(model), LOAD, repeat=1, kv_tokens=1 << 30, report=lambda line: None)


def test_the_command_prints_a_table_and_writes_a_file(model, tmp_path):
    path = tmp_path / "ladder.json"
    arguments = ["--num-prompts=2", "--max-input-len=8", "--max-output-len=4", "--repeat=1", "--prefix-len=0"]
    engine = ["--device=cpu", "--dtype=float32", "--threads=1", "--max-num-seqs=4", "--memory-budget=1MiB"]
    done = CliRunner().invoke(main, ["bench", "ladder", str(model), *arguments, *engine, f"--output-json={path}"])
    assert done.exit_code == 0, done.output
    fields = json.loads(path.read_text())
    assert [row["rung"] for row in fields["rungs"]] == CPU_RUNGS
    assert {"machine", "commit", "command", "version", "date", "model_id"} <= fields.keys()
    for name in CPU_RUNGS:
        assert f"| {name} " in done.stdout
    assert "Left out, since this device lacks them: + CUDA graphs, + overlap." in done.stdout


@pytest.mark.parametrize("switch", ["--scheduler=static", "--no-prefix-cache", "--overlap"])
def test_the_ladder_s_own_switches_are_no_options(switch):
    done = CliRunner().invoke(main, ["bench", "ladder", switch])
    assert done.exit_code == 2
    assert "No such option" in done.stderr
