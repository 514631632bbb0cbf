"""Samples, arithmetic and client beside those of `vllm bench serve` 0.26, which needs no GPU; skipped without it."""

import json
import lzma
import random

import pytest
from click.testing import CliRunner

from cli.main import main
from loadtest.datasets import DATASETS, Sampling
from loadtest.metrics import LATENCIES, metrics
from loadtest.records import Record
from loadtest.tokens import LocalTokenizer

vllm = pytest.importorskip("vllm.benchmarks.serve")
request_func = pytest.importorskip("vllm.benchmarks.lib.endpoint_request_func")
argparse_utils = pytest.importorskip("vllm.utils.argparse_utils")

PERCENTILES = [50.0, 95.0, 99.0]


@pytest.fixture(scope="module")
def folder(data_file, tmp_path_factory):
    """A tokenizer that both can load, with special tokens inside its vocabulary, two of them named in its settings."""
    path = tmp_path_factory.mktemp("tokenizer")
    fields = json.loads(lzma.decompress(data_file("tokenizers/qwen3_tokenizer.json.xz").read_bytes()))
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    for content in ("!", "#", "$", "%"):
        fields["added_tokens"].insert(0, {"id": fields["model"]["vocab"][content], "content": content, **plain})
    (path / "tokenizer.json").write_text(json.dumps(fields))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "#", "additional_special_tokens": ["%"]}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def parsed(*arguments):
    parser = argparse_utils.FlexibleArgumentParser()
    vllm.add_cli_args(parser)
    return parser.parse_args(list(map(str, arguments)))


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize(
    ("name", "options", "sampling"),
    [
        (
            "random",
            ["--random-input-len=40", "--random-output-len=9"],
            {"random_input_len": 40, "random_output_len": 9},
        ),
        (
            "random",
            ["--random-input-len=64", "--random-output-len=32", "--random-range-ratio=0.4", "--random-prefix-len=10"],
            {"random_input_len": 64, "random_output_len": 32, "range_ratio": 0.4, "random_prefix_len": 10},
        ),
        ("sharegpt", [], {}),
        ("sharegpt", ["--sharegpt-output-len=50"], {"output_len": 50}),
    ],
)
def test_the_same_seed_samples_the_same_requests(data_file, folder, seed, name, options, sampling):
    path = data_file("sharegpt_vllm_format.json") if name == "sharegpt" else None
    given = [f"--dataset-path={path}"] if path else []
    args = parsed("--dataset-name", name, "--num-prompts=60", "--seed", seed, *options, *given)
    theirs = vllm.get_samples(args, vllm.get_tokenizer(str(folder)))
    tokenizer = LocalTokenizer.from_file(folder)
    ours = DATASETS[name](Sampling(path, 60, seed, **sampling), tokenizer)
    assert [(each.prompts[0].content, each.prompts[0].prompt_len, each.prompts[0].output_len) for each in ours] == [
        (each.prompt, each.prompt_len, each.expected_output_len) for each in theirs
    ]


@pytest.mark.parametrize("count", [0, 1, 200])
def test_the_same_answers_give_the_same_figures(count):
    draw = random.Random(count)
    records = []
    for _ in range(count):
        itls = [draw.expovariate(50) for _ in range(draw.choice([0, 1, 5, 80]))]
        ttft = draw.expovariate(5)
        records.append(
            Record(
                start=100 + 20 * draw.random(),
                ttft=ttft,
                itls=itls,
                latency=ttft + sum(itls),
                prompt_tokens=draw.randrange(1, 900),
                output_tokens=len(itls) + 1,
                error="" if draw.random() < 0.9 else "broken",
            )
        )
    outputs = [
        request_func.RequestFuncOutput(
            success=not each.error,
            latency=each.latency,
            output_tokens=each.output_tokens,
            ttft=each.ttft,
            itl=each.itls,
            prompt_len=each.prompt_tokens,
            start_time=each.start,
        )
        for each in records
    ]
    objectives = {"ttft": 300.0, "tpot": 20.0, "e2el": 2000.0}
    theirs, _ = vllm.calculate_metrics([], outputs, 23.5, None, PERCENTILES, objectives)
    ours = metrics(records, 23.5, PERCENTILES, objectives)
    pairs = [(ours["total_input_tokens"], theirs.total_input), (ours["total_output_tokens"], theirs.total_output)]
    names = ("completed", "failed", "request_throughput", "request_goodput", "output_throughput")
    names += ("total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests")
    names += tuple(f"{each}_{name}_ms" for name in LATENCIES for each in ("mean", "median", "std"))
    pairs += [(ours[name], getattr(theirs, name)) for name in names]
    for name in LATENCIES:
        pairs += [(ours[f"p{each:g}_{name}_ms"], value) for each, value in getattr(theirs, f"percentiles_{name}_ms")]
    assert [mine for mine, _ in pairs] == pytest.approx([other for _, other in pairs], rel=1e-9)


def test_both_clients_measure_known_delays(mock_server, stream, folder, tmp_path):
    """200 ms to the first of 5 tokens and 50 ms to each further one; nothing comes before its time."""
    common = ["--backend=openai", "--model=m", "--tokenizer", folder, "--dataset-name=random", "--num-prompts=6"]
    common += ["--random-input-len=20", "--random-output-len=5", "--max-concurrency=3", "--temperature=0"]
    common += ["--percentile-metrics=ttft,tpot,itl,e2el", "--metric-percentiles=50,95,99", "--disable-tqdm"]
    common += ["--save-result", "--save-detailed", "--result-dir", tmp_path, "--result-filename"]

    async def answer(call):
        if call.path == "/v1/completions":
            await stream(call, first=0.2, gap=0.05)
        else:  # theirs asks for /tokenize, and does without
            await call.refuse("404 Not Found", "no such path")

    with mock_server(answer) as server:
        vllm.main(parsed(f"--base-url={server.url}", *common, "theirs.json"))
        arguments = ["bench", "serve", "--base-url", server.url, *map(str, common), "ours.json"]
        ran = CliRunner().invoke(main, arguments)
    assert ran.exit_code == 0, ran.output
    theirs, ours = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("theirs", "ours"))
    bodies = [call.body for call in server.calls if call.path == "/v1/completions"]
    asked = [(body["prompt"], body["max_tokens"], body["ignore_eos"]) for body in bodies]
    assert sorted(asked[:6]) == sorted(asked[6:])
    assert not theirs.keys() - ours.keys()
    same = ("num_prompts", "completed", "failed", "total_input_tokens", "total_output_tokens", "output_lens", "rtfx")
    assert [ours[name] for name in same] == [theirs[name] for name in same]
    assert [len(each) for each in ours["itls"]] == [len(each) for each in theirs["itls"]]
    for name, least in {"ttft": 200, "tpot": 50, "itl": 50, "e2el": 400}.items():
        for fields in (ours, theirs):
            assert least - 2 <= fields[f"median_{name}_ms"] < least + 150
