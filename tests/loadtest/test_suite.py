"""The suite: its rows, and whole runs of small ones against a real server on the CPU."""

import asyncio
import json
import statistics
from dataclasses import replace
from functools import partial

import pytest
from click.testing import CliRunner

from loadtest import suite, suite_rows
from loadtest.datasets import Sampling
from loadtest.records import LoadTestError, Target
from loadtest.report import read_result
from loadtest.serve import LoadTest
from loadtest.tables import number

pytestmark = pytest.mark.usefixtures("no_children")
CPU = ("--device=cpu", "--dtype=float32", "--log-level=warning")


@pytest.fixture
def small_rows(monkeypatch):
    """The suite's rows by these keys, with other fields."""

    def change(**changes: dict) -> None:
        for key, fields in changes.items():
            name = key.replace("_", "-")
            monkeypatch.setitem(suite_rows.ROWS, name, replace(suite_rows.ROWS[name], **fields))

    return change


@pytest.fixture
def sharegpt(tmp_path):
    """Six conversations of 60 and 8 bytes, which are the tiny model's tokens."""
    path = tmp_path / "sharegpt.json"
    turns = [[{"value": f"{n} " * 30}, {"value": "answer.."}] for n in range(6)]
    path.write_text(json.dumps([{"conversations": turn} for turn in turns]))
    return path


def run(*arguments):
    return CliRunner().invoke(suite.main, [str(each) for each in arguments])


def test_rows_run_from_start_to_table(tiny_model, tmp_path, small_rows, sharegpt):
    small_rows(
        rnd1k_c8={"count": 4, "lengths": (48, 6), "concurrency": 2},
        rnd7k_ids={"count": 2, "lengths": (40, 5)},
        sg_8={"count": 6, "rate": 50.0},
    )
    folder = tmp_path / "results"
    rows = ("--rows=sg-8,sg-all,rnd1k-c8,rnd7k-ids", f"--sharegpt={sharegpt}", "--repeat=2")
    ran = run(tiny_model, *rows, f"--result-dir={folder}", "--workers=1", "--commit=abc", "--gate", "--", *CPU)
    assert ran.exit_code == 0, ran.output
    results = {path.stem: read_result(path) for path in folder.glob("*.json")}
    assert len(results) == 8
    for fields in results.values():
        assert (fields["failed"], fields["commit"]) == (0, "abc")
        assert fields["machine"]["cores"] > 0
        # The core counts what the client counts.
        assert fields["server"]["generated_tokens"] == fields["total_output_tokens"] > 0
    for kind in ("core", "service", "gateway", "client"):  # a row alone may take less than the clock of a process tells
        assert sum(fields[f"{kind}_cpu_us_per_token"] for fields in results.values()) > 0
    assert results["rnd1k-c8-1"]["load"] == "rnd1k, concurrency 8"
    assert results["rnd1k-c8-1"]["total_output_tokens"] == 4 * 6
    assert results["rnd1k-c8-1"]["seed"] != results["rnd1k-c8-2"]["seed"]
    assert results["rnd7k-ids-1"]["total_output_tokens"] == 2 * 5
    for repeat in (1, 2):  # sg-all begins with an empty cache; sg-8 finds the 3 full pages of each of its prompts there
        cold, warm = results[f"sg-all-{repeat}"], results[f"sg-8-{repeat}"]
        assert cold["total_input_tokens"] == warm["total_input_tokens"] == 6 * 60
        assert (cold["cached_tokens"], warm["cached_tokens"]) == (0, 6 * 48)
    lines = [line for line in ran.stdout.splitlines() if "WARNING" not in line]  # of a machine that is busy
    assert [line.split()[0] for line in lines[1:9]] == 2 * ["rnd1k-c8", "rnd7k-ids", "sg-all", "sg-8"]
    rates = [results[f"rnd1k-c8-{repeat}"]["request_throughput"] for repeat in (1, 2)]
    (row,) = (line for line in lines if line.startswith("| rnd1k, concurrency 8 "))
    assert f"5.56 / {number(statistics.median(rates))} (" in row  # the reference's, and ours
    assert "of 6 targets are met" in lines[-1]


def test_mixed_row_watches_the_server(tiny_model, tmp_path, small_rows):
    small_rows(card24={"count": 1000, "lengths": (100, 300), "concurrency": 4, "options": ("--memory-budget=1MiB",)})
    ran = run(tiny_model, "--rows=card24", f"--result-dir={tmp_path}", "--seconds=4", "--workers=1", "--", *CPU)
    assert ran.exit_code == 0, ran.output
    fields = read_result(tmp_path / "card24-1.json")
    assert 4 <= fields["completed"] == fields["num_prompts"] < 5000  # ended by the time, not by the count
    assert 4 <= fields["duration"] < 20
    # A page holds 16 tokens of k and v, of 2 layers, 2 heads of 16 values, 4 bytes each: 8 KiB.
    assert fields["pages_at_end"]["total_pages"] == 2**20 // (16 * 2 * 2 * 2 * 16 * 4)
    assert fields["pages_at_end"]["used_pages"] == 0
    assert fields["pages_add_up"]
    assert any(each["used_pages"] for each in fields["samples"])
    assert 0 <= fields["least_running"] <= fields["median_running"] <= 4
    assert "0 failed" in ran.stdout
    assert "cached = 128" in ran.stdout


def test_server_that_cannot_start_is_told(tiny_model, tmp_path):
    ran = run(tiny_model, "--rows=rnd1k-c1,rnd1k-c8", f"--result-dir={tmp_path}", "--", *CPU, "--page-size=none")
    assert ran.exit_code == 1
    assert "rnd1k-c1 FAILED: the server ended with status 2" in ran.stdout
    assert "'none' is not a valid integer" in ran.stdout  # its last words
    assert "rnd1k-c8 FAILED: as above" in ran.stdout


def test_row_without_time_is_not_begun(tiny_model, tmp_path):
    ran = run(tiny_model, "--rows=rnd1k-c1", f"--result-dir={tmp_path}", "--time-limit=8")
    assert ran.exit_code == 1
    # 4 requests at the reference's 0.807 a second, and 6 s.
    assert "Stopped before rnd1k-c1: it takes about 11 s" in ran.stderr
    assert not list(tmp_path.iterdir())


def test_rows_are_the_reference_s():
    reference = {row["load"]: row for row in read_result(suite.REFERENCE)["rows"]}
    for row in suite_rows.ROWS.values():
        if row.compared_with:
            theirs = reference[row.compared_with]
            assert row.count == theirs.get("num_prompts", row.count), row
            if row.dataset == "random" and "num_prompts" in theirs:
                assert row.lengths[0] * row.count == theirs["total_input_tokens"], row
                assert row.lengths[1] * row.count == theirs["total_output_tokens"], row
    assert [row.key for row in suite_rows.select("sg-2000,sg-rates")] == [
        *("sg-all", "sg-32", "sg-16", "sg-8", "sg-4", "sg-2", "sg-1"),
        "sg-2000",
    ]
    assert {key for key, *_ in suite_rows.TARGETS} <= set(suite_rows.ROWS)
    with pytest.raises(LoadTestError, match="no row 'rnd2k'"):
        suite_rows.select("rnd1k,rnd2k")


def test_row_of_token_ids_sends_the_ids_of_its_texts(tiny_model):
    target, sampling = Target("openai", "", "", "m", {}, {}), Sampling(count=2, random_input_len=40)
    test = LoadTest(target, "random", sampling, tokenizer_path=tiny_model)
    row = suite_rows.ROWS["rnd7k-ids"]
    texts, ids = (suite.chains_of(replace(row, as_ids=as_ids), test) for as_ids in (False, True))
    for text, each in zip(texts, ids, strict=True):
        content = text.prompts[0].content.encode()
        assert len(each.prompts[0].content) == len(content)  # a token is a byte here
        assert each.prompts[0].prompt_len == text.prompts[0].prompt_len == len(content)


def test_gate_counts_targets_that_are_met():
    figures = {"rnd1k-c1": {"p50_tpot_ms": 4.4}, "rnd1k-c256": {"request_throughput": 29.39, "p99_itl_ms": 60.1}}
    lines = suite_rows.gate(figures)
    assert [line.split()[0] for line in lines] == ["met", "MISSED", "MISSED", "1"]
    assert lines[-1] == "1 of 3 targets are met"


def test_mixed_lengths_have_their_mean_and_reach_the_longest():
    lengths = suite_rows.mixed_lengths(20_000, 2800, 8192, seed=1)
    sums = [sum(each) for each in lengths]
    assert statistics.fmean(sums) == pytest.approx(2800, rel=0.02)
    assert max(sums) == 8192
    assert sum(each == 8192 for each in sums) / len(sums) == pytest.approx(0.01, rel=0.2)
    assert min(min(each) for each in lengths) >= 1
    # Long requests stay no longer: completions have the same mean among the longer half.
    longer = [output for total, (_, output) in zip(sums, lengths, strict=True) if total > 2800]
    assert statistics.fmean(longer) == pytest.approx((128 + 512) / 2, rel=0.02)
    assert suite_rows.mixed_lengths(10, 2800, 8192, seed=1) == suite_rows.mixed_lengths(10, 2800, 8192, seed=1)


def a_load(url: str, **settings) -> LoadTest:
    target = Target("openai", url, "/v1/completions", "m", {}, {})
    return LoadTest(target, "shared-prefix", Sampling(count=40, prefixes=40), progress=False, **settings)


@pytest.mark.parametrize("workers", [1, 2])
def test_no_request_begins_after_the_seconds(mock_server, stream, workers):
    with mock_server(partial(stream, first=0.2)) as server:
        test = a_load(server.url, max_concurrency=2, seconds=0.5, workers=workers)
        done = test.run(test.chains())
    # Each slot begins one at 0, about 0.2 and about 0.4 s; what has begun is finished.
    assert 2 <= done.fields["completed"] <= 6
    assert (done.fields["unfinished"], done.fields["failed"]) == (0, 0)


def test_load_that_hangs_is_given_up(mock_server):
    async def hang(call):
        await asyncio.Event().wait()

    with mock_server(hang) as server:
        test = a_load(server.url, give_up=0.3)
        done = test.run(test.chains())
    assert (done.fields["unfinished"], done.fields["completed"]) == (40, 0)
    assert 0.3 <= done.fields["duration"] < 5


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--seconds", "nan"], 2, "--seconds"),
        (["--seconds", "inf"], 2, "--seconds"),
        (["--time-limit", "0"], 2, "--time-limit"),
        (["--start-seconds", "-1"], 2, "--start-seconds"),
        (["--workers", "0"], 2, "--workers"),
        (["--reference", "{folder}/binary"], 1, "cannot be read"),
        (["--reference", "{folder}/other"], 1, "no file of rows"),
        (["--reference", "{folder}/none"], 1, "has no rate of rnd1k, concurrency 1"),
        (["--result-dir", "{folder}/binary/x"], 1, "cannot be written"),
    ],
)
def test_what_cannot_be_run_is_told_first(tmp_path, arguments, status, message):
    (tmp_path / "binary").write_bytes(b"\xff")
    (tmp_path / "other").write_text('{"rows": [3]}')
    (tmp_path / "none").write_text('{"rows": []}')
    given = [each.format(folder=tmp_path) for each in arguments]
    ran = CliRunner().invoke(suite.main, [str(tmp_path), "--rows", "rnd1k", "--result-dir", str(tmp_path), *given])
    assert (ran.exit_code, message in ran.stderr) == (status, True), ran.output
    assert "Traceback" not in ran.stderr
