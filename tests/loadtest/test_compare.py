"""Results side by side: the reference's own files, whose figures are written on its page."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.main import main
from loadtest.compare import compare
from loadtest.environment import command, environment
from loadtest.records import LoadTestError
from loadtest.report import read_result
from loadtest.tables import serve_table


@pytest.fixture
def reference(data_file) -> Path:
    """Result files of vLLM 0.26.0, beside the data."""
    folder = data_file("README.md").parent.parent / "reference" / "vllm-0.26.0-h200"
    if not folder.is_dir():
        pytest.skip("the reference results are not at hand")
    return folder


def cells(text: str, title: str) -> list[str]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    (row,) = (row for row in rows if row[0] == title)
    return row[1:]


def test_reference_results_side_by_side(reference):
    names = ("rnd1k_fresh_c128", "rnd1k_fresh_c256", "offline_8192")
    ran = CliRunner().invoke(main, ["bench", "compare", *(str(reference / f"{name}.json") for name in names)])
    assert ran.exit_code == 0, ran.output
    text = ran.output
    assert cells(text, "") == list(names)
    assert cells(text, "requests/s") == ["27.23 (x1.000)", "29.18 (x1.072)", "90.92 (x3.339)"]
    assert cells(text, "output tokens/s") == ["6,970.61 (x1.000)", "7,469.69 (x1.072)", "-"]
    assert cells(text, "TPOT median, ms") == ["16.10 (x1.000)", "30.96 (x1.923)", "-"]
    assert cells(text, "ITL p99, ms") == ["180.56 (x1.000)", "187.24 (x1.037)", "-"]
    assert "Not like for like: other num prompts, max concurrency, input tokens, output tokens." in text


def test_like_and_like_have_no_note(reference):
    fields = read_result(reference / "rnd1k_c1.json")
    assert "Not like" not in compare({"a": fields, "b": fields})
    assert "void" in compare({"a": fields, "b": fields | {"token_latencies_void": True}})
    assert "the client may have been the limit" in compare({"a": fields | {"client_saturated": True}})


def test_a_run_of_which_nothing_succeeded_has_no_figures():
    done = {"completed": 2, "failed": 0, "request_throughput": 4.0, "p50_ttft_ms": 9.0}
    failed = {"completed": 0, "failed": 2, "request_throughput": 0.0, "p50_ttft_ms": 0.0}
    text = compare({"a": done, "b": failed})
    assert cells(text, "failed") == ["0", "2"]
    assert cells(text, "requests/s") == ["4.00 (x1.000)", "-"]
    assert cells(text, "TTFT p50, ms") == ["9.00 (x1.000)", "-"]


def test_what_is_no_result_is_told(tmp_path):
    for text in ("{", "[1]"):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(LoadTestError):
            read_result(tmp_path / "a.json")
    with pytest.raises(LoadTestError, match="no result files"):
        compare({"a": {"x": 1}})
    for odd in ("2.0", [2.0]):
        with pytest.raises(LoadTestError, match="b is no result file of a load test: its p99_itl_ms is no number"):
            compare({"a": {"request_throughput": 1.0}, "b": {"request_throughput": 1.0, "p99_itl_ms": odd}})


@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")  # as matplotlib and numpy warn
def test_results_are_drawn_without_those_that_have_no_rate(tmp_path):
    """Of a run without a server, of one with other percentiles, of one without any that succeeded."""
    served = {"request_rate": "inf", "completed": 1, "request_throughput": 2.0, "request_goodput": None}
    results = {
        "offline": {"requests_per_second": 3.0},
        "p50": served | {"p50_ttft_ms": 11.0},
        "p99": served | {"p99_ttft_ms": 12.0, "request_rate": 4.0},
    }
    for name, fields in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(fields))

    def drawn(*names: str):
        files = [str(tmp_path / f"{name}.json") for name in names]
        return CliRunner().invoke(main, ["bench", "compare", *files, "--plot-dir", str(tmp_path / "plots")])

    ran = drawn("offline", "p50", "p99")
    assert ran.exit_code == 0, ran.output
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"goodput.svg", "latency.svg"}
    alone = drawn("offline")
    assert alone.exit_code == 1
    assert "Error: there is nothing to draw: no result has a request rate" in alone.output
    assert "3.00 (x1.000)" in alone.output, "the table comes first"


def test_table_of_a_sweep(reference):
    row = read_result(reference / "sg_inf2k.json")
    lines = serve_table([row, row | {"completed": 0, "failed": 3}]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[2] == [
        "inf requests/s", "46.9", "9,433", "8,241", "22,559", "82.5", "148", "70.8", "140", "0"
    ]  # fmt: skip
    assert cells[3] == ["inf requests/s", *[""] * 8, "3"], "no figures of a row without success"


def test_results_say_where_they_come_from():
    fields = environment()
    assert {"machine", "commit", "version", "versions", "command"} == fields.keys()
    assert fields["machine"]["cores"] >= 1
    json.dumps(fields)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["/usr/bin/fulcrum", "bench", "serve", "--port=1"], "fulcrum bench serve --port=1"),
        (["fulcrum", "bench", "--dataset-path", "{folder}/a.json"], "fulcrum bench --dataset-path a.json"),
        (["fulcrum", "bench", "--dataset-path={folder}/a.json"], "fulcrum bench --dataset-path=a.json"),
        (["fulcrum", "--endpoint=/v1/chat", "--header", "k=v"], "fulcrum --endpoint=/v1/chat --header k=..."),
        (["fulcrum", "--header=x-key=k=v", "--model", "a b"], "fulcrum --header=x-key=... --model 'a b'"),
        (["{folder}/loadtest/suite.py", "m.gguf"], "python -m loadtest.suite m.gguf"),
        (["{folder}/tests/gpu/bench_steps.py", "m"], "python tests/gpu/bench_steps.py m"),
    ],
)
def test_the_command_of_a_result_names_no_folder_and_no_key(arguments, shown, tmp_path):
    assert command([argument.format(folder=tmp_path) for argument in arguments]) == shown
