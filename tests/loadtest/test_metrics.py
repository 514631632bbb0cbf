"""The arithmetic of a run, against figures worked out by hand; and what is printed of it."""

import pytest

from loadtest.arrivals import arrival_times
from loadtest.metrics import metrics
from loadtest.records import Record
from loadtest.report import print_out, warnings

RECORDS = [
    Record(0, 0, start=10.0, ttft=0.1, itls=[0.02, 0.03], latency=0.15, prompt_tokens=5, output_tokens=3),
    Record(1, 0, start=10.5, ttft=0.3, itls=[], latency=0.3, prompt_tokens=7, output_tokens=1, cached_tokens=4),
    Record(2, 0, start=11.2, ttft=0.2, itls=[0.05] * 4, latency=0.5, prompt_tokens=8, output_tokens=5),
    Record(3, 0, start=10.0, ttft=9.0, latency=9.0, prompt_tokens=100, error="HTTP 500: no"),
]
ABOUT = {"max_concurrency": 4, "request_rate": 2.0, "unfinished": 0, "client_saturated": False}


def client(*usages):
    """Fields of a result file about worker processes of these (mean, peak, busy)."""
    named = [dict(zip(("mean", "peak", "busy"), usage, strict=True)) for usage in usages]
    return {"workers": len(usages), "client_cpu": named}


@pytest.fixture
def result() -> dict:
    return metrics(RECORDS, 2.0, (50, 95, 99), {"ttft": 200, "tpot": 50})


def test_counts_and_throughputs(result):
    assert (result["completed"], result["failed"]) == (3, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"], result["cached_tokens"]) == (20, 9, 4)
    assert result["request_throughput"] == 1.5
    assert result["output_throughput"] == 4.5
    assert result["total_token_throughput"] == 14.5
    assert result["events_per_token"] == 1.0
    assert result["token_latencies_void"] is False


def test_peaks_are_those_of_whole_seconds_from_the_first_start(result):
    # Events at 0.10, 0.12, 0.15, 0.80 and at 1.40, 1.45, 1.50, 1.55, 1.60 seconds.
    assert result["max_output_tokens_per_s"] == 5
    # 0 and 1 within the first second (one after the other), 2 within the next.
    assert result["max_concurrent_requests"] == 2


def test_goodput_counts_what_meets_every_objective(result):
    # TTFT 100, 300, 200 ms; TPOT 25, none, 75 ms: only the first is good. Limits themselves are good.
    assert result["request_goodput"] == 0.5
    assert metrics(RECORDS, 2.0, objectives={"ttft": 300})["request_goodput"] == 1.5
    assert metrics(RECORDS, 2.0, objectives={"e2el": 299})["request_goodput"] == 0.5
    assert metrics(RECORDS, 2.0)["request_goodput"] is None


def test_latencies(result):
    def figures(name, *kinds):
        return tuple(result[f"{kind}_{name}_ms"] for kind in kinds)

    assert figures("ttft", "mean", "median") == pytest.approx((200, 200))
    assert figures("ttft", "std", "p50", "p95", "p99") == pytest.approx(((20000 / 3) ** 0.5, 200, 290, 298))
    # (150 - 100) / 2 and (500 - 200) / 4 ms; the single token has none.
    assert figures("tpot", "mean", "median", "std", "p99") == pytest.approx((50, 50, 25, 25 + 0.99 * 50))
    # 20, 30, 50, 50, 50, 50
    assert figures("itl", "mean", "median") == pytest.approx((250 / 6, 50))
    assert figures("itl", "std") == pytest.approx(((11300 / 6 - (250 / 6) ** 2) ** 0.5,))
    assert figures("e2el", "mean") == pytest.approx((950 / 3,))


def test_no_success_gives_zeros():
    result = metrics([RECORDS[3]], 2.0)
    assert (result["completed"], result["failed"]) == (0, 1)
    assert (result["events_per_token"], result["token_latencies_void"]) == (0.0, False)
    assert {result[f"p{each}_itl_ms"] for each in (50, 95, 99)} == {0}


@pytest.mark.parametrize(("events", "void"), [(98, False), (97, True)])
def test_token_latencies_are_void_when_tokens_come_together(events, void):
    record = Record(0, 0, 0.0, 0.1, [0.01] * (events - 1), 1.0, 3, 100)
    fields = ABOUT | client((0.1, 0.2, 0.3)) | metrics([record], 1.0, selected=("ttft", "tpot", "itl"))
    assert fields["events_per_token"] == events / 100
    assert fields["token_latencies_void"] is void
    assert print_out(fields).count("(VOID)") == (2 if void else 0)
    assert any("void" in warning for warning in warnings(fields, [record])) is void


def test_print_out():
    figures = metrics(RECORDS, 2.0, objectives={"ttft": 200, "tpot": 50}, selected=("ttft",))
    fields = ABOUT | client((0.25, 0.5, 0.6), (0.5, 0.75, 0.8)) | figures
    assert print_out(fields) == "\n".join(
        [
            "============ Serving Benchmark Result ============",
            "Successful requests:                     3         ",
            "Failed requests:                         1         ",
            "Maximum request concurrency:             4         ",
            "Request rate configured (RPS):           2.00      ",
            "Benchmark duration (s):                  2.00      ",
            "Total input tokens:                      20        ",
            "Total generated tokens:                  9         ",
            "Request throughput (req/s):              1.50      ",
            "Request goodput (req/s):                 0.50      ",
            "Output token throughput (tok/s):         4.50      ",
            "Peak output token throughput (tok/s):    5.00      ",
            "Peak concurrent requests:                2         ",
            "Total token throughput (tok/s):          14.50     ",
            "---------------Time to First Token----------------",
            "Mean TTFT (ms):                          200.00    ",
            "Median TTFT (ms):                        200.00    ",
            "P50 TTFT (ms):                           200.00    ",
            "P95 TTFT (ms):                           290.00    ",
            "P99 TTFT (ms):                           298.00    ",
            "----------------------Client----------------------",
            "Events per token:                        1.00      ",
            "Cached input tokens:                     4         ",
            "Worker processes:                        2         ",
            "CPU of the busiest worker (cores):       0.50      ",
            "  in its busiest second:                 0.75      ",
            "  with its wait for a core:              0.80      ",
            "==================================================",
        ]
    )
    assert warnings(fields, RECORDS) == ["failed, 1 times: HTTP 500: no"]


def test_a_client_near_saturation_is_warned_of(result):
    (warning,) = warnings(result | {"client_saturated": True}, RECORDS[:3])
    assert "--workers" in warning


def test_result_file_has_the_keys_of_the_reference(result, data_file):
    import json

    folder = data_file("README.md").parent.parent / "reference" / "vllm-0.26.0-h200"
    if not folder.is_dir():
        pytest.skip("the reference results are not at hand")
    reference = json.loads((folder / "sg_inf2k.json").read_text())
    of_the_run = ("date", "endpoint_type", "backend", "label", "model_id", "num_prompts", "burstiness")
    fields = metrics(RECORDS, 2.0, (50, 90, 95, 99)) | ABOUT | dict.fromkeys(of_the_run)
    assert reference.keys() <= fields.keys()


# Of `vllm bench serve` 0.26.0 (its get_request), with numpy.random.seed(1), 2 requests per second.
POISSON = [0.578338851, 1.943921066, 1.944043657, 2.329898199, 2.5]
BURSTY = [1.455223354, 1.455223354, 1.5]


def test_arrivals_are_those_of_the_reference_for_the_same_seed():
    assert arrival_times(5, 2.0, 1.0, 1) == pytest.approx(POISSON, abs=1e-8)
    assert arrival_times(3, 2.0, 0.3, 1) == pytest.approx(BURSTY, abs=1e-8)


def test_arrivals_at_extremes():
    assert arrival_times(3, float("inf"), 1.0, 0) == [0, 0, 0]
    assert arrival_times(3, 2.0, float("inf"), 0) == [0.5, 1.0, 1.5]
    assert arrival_times(0, 2.0, 1.0, 0) == []


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 8.0])
def test_gaps_have_the_spread_of_a_gamma_distribution(burstiness):
    import numpy as np

    times = arrival_times(20_000, 10.0, burstiness, 0)
    gaps = np.diff([0.0, *times])
    assert times[-1] == pytest.approx(2000)
    # The coefficient of variation of a gamma distribution is 1/sqrt(shape).
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)
