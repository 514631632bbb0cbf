"""docs/benchmarks.md: made from result files alone, and the committed page is what the command makes."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from loadtest import dummy_model
from loadtest.docs import FOLDER, main, render
from loadtest.records import LoadTestError

ORIGIN = {
    "date": "20261130-101112",
    "machine": {"cpu": "Some CPU", "cores": 2, "memory_gib": 7.5, "gpus": ["Some GPU"]},
    "versions": {"torch": "2.13.0", "triton": None},
    "commit": "0123456789abcdef+",
    "command": "fulcrum bench something",
}
SAID = (
    "Measured 2026-11-30 on Some CPU, 2 cores, 7.5 GiB, Some GPU; torch 2.13.0; commit 012345678 with changes."
    " Command: `fulcrum bench something`"
)


@pytest.fixture
def results(tmp_path):
    """Writes result files; gives their folder."""

    def write(**files: dict) -> Path:
        for name, fields in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(ORIGIN | fields))
        return tmp_path

    return write


def cells(page: str, row: int) -> list[str]:
    """The cells of a line of the page's first table; 0 is the head."""
    lines = [line for line in page.splitlines() if line.startswith("|") and not line.startswith("|-")]
    return [cell.strip() for cell in lines[row].strip("|").split("|")]


def served(load: str | None, rate: float, **fields: object) -> dict:
    return {"load": load, "request_throughput": rate, "output_throughput": 100 * rate, "p50_ttft_ms": 20.0, **fields}


def test_the_committed_page_is_what_the_command_makes():
    done = CliRunner().invoke(main, ["--check"])
    assert done.exit_code == 0, done.output


# Of `figures_told.txt`: a reference's row, the median of our runs of a load, and a figure with fewer digits.
MACROS = """
{%- macro vllm(row, key) %}{{ figure("reference-vllm-0.26.0-h200.json", "rows", row, key) }}{% endmacro -%}
{%- macro ours(load, key) %}{{ figure("h200/" ~ load ~ "-*.json", key) }}{% endmacro -%}
{%- macro short(text, digits=0) %}{{ ("%." ~ digits ~ "f") | format(text | float) }}{% endmacro -%}
"""


def test_other_pages_say_what_was_measured():
    """What README, blog and question tell in sentences, as templates of these, under each page's name."""
    page = ""
    for line in Path(__file__).with_name("figures_told.txt").read_text().splitlines():
        if line.startswith(" "):
            assert render(MACROS + line.strip(), FOLDER / "results") in page
        else:
            page = " ".join((FOLDER.parent / line).read_text().split())


def test_prose_has_no_measurement_typed_by_hand():
    """A figure with a unit comes out of a result file; only a prediction is an author's own."""
    prose = re.sub(r"{{.*?}}|{#.*?#}", "_", (FOLDER / "benchmarks.md.in").read_text(), flags=re.DOTALL)
    measured = [part for part in prose.split("\n\n") if not part.startswith("**Predicted")]
    unit = r"\d\s*(?:%|[nµm]?s\b|times\b|[GT]B/s|[GT]FLOP|tokens/s|requests/s|page faults)"
    assert [found for part in measured for found in re.findall(rf".*{unit}.*", part)] == []


@pytest.mark.parametrize("change", ["template", "result", "page"])
def test_check_fails_when_anything_was_changed(tmp_path, results, change):
    results_folder = tmp_path / "results"
    results_folder.mkdir()
    result = ORIGIN | {"rows": [{"label": "a", "streams": 30.25}]}
    (results_folder / "a.json").write_text(json.dumps(result))
    template, page = tmp_path / "benchmarks.md.in", tmp_path / "benchmarks.md"
    template.write_text('Prose.\n\n{{ peers("a.json") }}\n')
    command = ["--folder", str(tmp_path)]
    assert CliRunner().invoke(main, [*command, "--check"]).exit_code == 1
    assert not page.exists()
    assert CliRunner().invoke(main, command).exit_code == 0
    assert CliRunner().invoke(main, [*command, "--check"]).exit_code == 0
    assert "| a   |    30.2 |" in page.read_text()
    if change == "template":
        template.write_text(template.read_text() + "More.\n")
    elif change == "result":
        result["rows"][0]["streams"] = 31.0
        (results_folder / "a.json").write_text(json.dumps(result))
    else:
        page.write_text(page.read_text().replace("30.2", "99.9"))
    before = page.read_text()
    done = CliRunner().invoke(main, [*command, "--check"])
    assert (done.exit_code, page.read_text()) == (1, before)
    assert "benchmarks.md is not what its template" in done.stderr


def test_a_missing_file_is_named(results):
    with pytest.raises(LoadTestError, match=r"not-there\.json"):
        render('{{ ladder("not-there.json") }}', results())


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ nonsense }}", "'nonsense' is undefined"),
        ("\n{% if %}", "line 2"),
        ('{{ figure("a.json", "rows", 7) }}', "a.json has no 7"),
        ('{{ table("a.json", {"x": "no_such"}) }}', "no_such"),
        ('{{ ladder("a.json") }}', "rungs"),
    ],
)
def test_a_wrong_placeholder_is_an_error(results, template, message):
    with pytest.raises(LoadTestError, match=message):
        render(template, results(a={"rows": []}))


@pytest.mark.parametrize("lacking", ["machine", "command", "commit"])
def test_a_file_that_does_not_say_where_it_comes_from_is_refused(results, lacking):
    with pytest.raises(LoadTestError, match=f"a.json.* {lacking}"):
        render('{{ serve("a.json") }}', results(a=served("x", 1.0) | {lacking: None}))


def test_ladder(results):
    figures = {"p50_ttft_ms": 10.5, "p99_ttft_ms": 100.25, "p99_itl_ms": 8.125, "output_throughput": 1234.5}
    rungs = [
        {
            "rung": name,
            "request_throughput": rate,
            "request_throughput_min": rate * 0.9,
            "request_throughput_max": rate * 1.1,
            "factor_before": before,
            "factor_first": first,
            "peak_running": peak,
            "equal_answers": equal,
            "kv_tokens": 4096,
            **figures,
        }
        for name, rate, before, first, peak, equal in [
            ("static batching", 2.0, 1.0, 1.0, 4, 6),
            ("+ paged allocation", 6.0, 3.0, 3.0, 11, 7),
        ]
    ]
    load = {
        "num_prompts": 8,
        "total_input_tokens": 1000,
        "total_output_tokens": 2000,
        "prefix_len": 16,
        "prefix_groups": 2,
        "max_output_len": 64,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "dtype": "bfloat16",
        "device": "cpu",
        "repeat": 3,
    }
    page = render('{{ ladder("a.json") }}', results(a={"rungs": rungs, "left_out": ["+ CUDA graphs"], **load}))
    assert cells(page, 1) == ["static batching", "2.00", "1,234", "1.00", "1.00", "10.5", "100", "8.12", "4"]
    assert cells(page, 2) == ["+ paged allocation", "6.00", "1,234", "3.00", "3.00", "10.5", "100", "8.12", "11"]
    assert "4,096 tokens of KV" in page
    assert "at most 1.22 times as fast" in page, "1.1 over 0.9"
    assert "first rung: 6 to 7 of 8." in page
    assert "Left out, since this device lacks them: + CUDA graphs." in page
    assert page.endswith(SAID)
    once = render('{{ ladder("a.json") }}', results(a={"rungs": rungs, "left_out": [], **load, "repeat": 1}))
    assert "; one run." in once
    assert "as fast as the slowest" not in once


def test_serve_rows_are_named_by_load_or_rate(results):
    folder = results(a=served("sg, 1 req/s", 0.98), b=served(None, 31.5, request_rate=32.0, failed=0))
    page = render('{{ serve("a.json", "b.json") }}', folder)
    assert cells(page, 0) == ["load", "requests/s", "output tokens/s", "TTFT p50, ms", "failed"]
    assert cells(page, 1) == ["sg, 1 req/s", "0.980", "98.0", "20.0", ""]
    assert cells(page, 2) == ["32.0 requests/s", "31.5", "3,150", "20.0", "0"]
    assert page.count("Measured") == 1, "one machine, one commit, one command: said once"


def test_compare_gives_theirs_ours_and_the_ratio(results):
    rows = [served("one", 10.0), served("two", 20.0), served("offline", 30.0)]
    reference = {"name": "vLLM 9", "rows": rows, "source": "print-outs.", "commit": None, "command": "vllm serve"}
    offline = {"requests_per_second": 45.0, "elapsed_time": 1.0}
    folder = results(ref=reference, mine=served("two", 25.0, p50_ttft_ms=10.0), own=offline)
    page = render('{{ compare("ref.json", "mine.json", ("offline", "own.json")) }}', folder)
    assert cells(page, 0) == ["load", "requests/s", "output tokens/s", "TTFT p50, ms"]
    assert cells(page, 1) == ["two", "20.0 / 25.0 (1.25)", "2,000 / 2,500 (1.25)", "20.0 / 10.0 (0.50)"]
    assert cells(page, 2) == ["offline", "30.0 / 45.0 (1.50)", "3,000 / -", "20.0 / -"]
    assert "Each cell: vLLM 9 / Fulcrum (ratio). Not compared yet: one." in page
    assert "Source: print-outs. Command: `vllm serve`" in page
    assert SAID in page


def test_of_several_runs_the_medians_are_compared(results):
    folder = results(ref={"name": "vLLM 9", "rows": [served("one", 4.0), served("two", 1.0)]})
    for number, rate in enumerate((9.0, 8.0, 2.0), 1):
        results(**{f"one-{number}": served("one", rate)})
    results(**{"two-1": served("two", 3.0)})
    page = render(
        '{{ compare("ref.json", "one-*.json", "two-*.json") }} {{ figure("one-*.json", "request_throughput") }}', folder
    )
    assert cells(page, 1)[1] == "4.00 / 8.00 (2.00)"
    assert "Medians; runs: 3 of one, 1 of two." in page
    assert page.endswith(" 8.00")
    with pytest.raises(LoadTestError, match=r"no three-\*\.json"):
        render('{{ figure("three-*.json", "request_throughput") }}', folder)


def test_compare_refuses_a_load_that_the_reference_lacks(results):
    folder = results(ref={"name": "vLLM", "rows": [served("one", 1.0)]}, mine=served("other", 2.0))
    with pytest.raises(LoadTestError, match="'other' is none of the reference's: one"):
        render('{{ compare("ref.json", "mine.json") }}', folder)


@pytest.mark.parametrize(
    ("kind", "row", "head"),
    [
        (
            "peers",
            {"label": "llama.cpp", "streams": 16, "output_throughput": 300},
            ["", "streams", "output tokens/s"],
        ),
        (
            "page_sizes",
            {"page_size": 16, "hit_rate": 0.294, "ideal_hit_rate": 1},
            ["page size", "prefix hit rate", "infinite cache"],
        ),
    ],
)
def test_kinds_of_rows(results, kind, row, head):
    page = render(f'{{{{ {kind}("a.json") }}}}', results(a={"rows": [row]}))
    assert cells(page, 0) == head
    assert cells(page, 1) == [str(value) for value in row.values()]
    assert page.endswith(SAID)


def test_any_table_and_a_figure_in_prose(results):
    folder = results(a={"rows": [{"n": 1, "ms": 0.5}, {"n": 1000, "ms": 12345.6}]})
    page = render(
        '{{ table("a.json", {"N": "n", "time": "ms"}) }}\n\nIt took {{ figure("a.json", "rows", 0, "ms") }}.', folder
    )
    assert [cells(page, row) for row in range(3)] == [["N", "time"], ["1", "0.500"], ["1,000", "12,346"]]
    assert page.endswith("It took 0.500.")


def test_the_reference_has_every_row_of_the_page_it_was_taken_from():
    """Nineteen rows of figures, one of them for two settings; two of the numbers read from it by hand."""
    reference = json.loads((FOLDER / "results" / "reference-vllm-0.26.0-h200.json").read_text())
    rows = {row["load"]: row for row in reference["rows"]}
    assert len(rows) == len(reference["rows"]) == 20
    assert rows["sg, 2,000 at once, 4 API processes"]["output_throughput"] == 18662
    assert rows["rnd1k, concurrency 256"]["p99_ttft_ms"] == pytest.approx(5884, abs=1)
    assert all(row["request_throughput"] > 0 and row["output_throughput"] > 0 for row in rows.values())


def test_files_that_cannot_be_read_or_written_are_told(tmp_path):
    def said():
        ran = CliRunner().invoke(main, ["--folder", str(tmp_path)])
        assert ran.exit_code == 1
        return ran.stderr

    assert said().startswith("Error: [Errno 2]")
    template = tmp_path / "benchmarks.md.in"
    template.write_bytes(b"\xff")
    assert said().startswith("Error: 'utf-8' codec")
    template.write_text("text")
    (tmp_path / "benchmarks.md").mkdir()
    assert said().startswith("Error: [Errno 21]")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.json", b"{", "is no tokenizer.json"),
        ("t.json", b"\xff", "is no tokenizer.json"),
        ("t.json", b"{}", "is no tokenizer.json"),
        ("t.json.xz", b"{}", "cannot be decompressed"),
    ],
)
def test_a_tokenizer_of_another_form_is_told(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    options = ["--tokenizer", str(path), "--tokenizer-config", str(path)]
    ran = CliRunner().invoke(dummy_model.main, ["0.5B", str(tmp_path / "model"), *options])
    assert ran.exit_code == 1
    assert message in ran.stderr
    ran = CliRunner().invoke(dummy_model.main, ["0.5B", str(path / "model"), *options])
    assert (ran.exit_code, ran.stderr.startswith("Error: [Errno 20]")) == (1, True)
