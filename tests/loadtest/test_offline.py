"""Runs without a server: a tiny model of random weights, whose tokens are bytes."""

import json
import statistics
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from cli.main import main
from engine import FinishReason
from loadtest import offline
from loadtest.records import LoadTestError

ENGINE = ["--load-format", "dummy", "--device", "cpu", "--dtype", "float32", "--threads", "1"]
ENGINE += ["--memory-budget", "4MiB", "--max-num-seqs", "4"]


@pytest.fixture
def bench(tiny_model, tmp_path):
    """Runs a command on the tiny model; returns what it printed and its result file."""

    def run(command, *arguments):
        path = tmp_path / "result.json"
        given = ["bench", command, *ENGINE, "--output-json", path, *arguments, tiny_model]
        ran = CliRunner().invoke(main, list(map(str, given)))
        assert ran.exit_code == 0, ran.output
        return ran.stdout, json.loads(path.read_text())

    return run


def test_throughput_counts_every_token(bench, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "twelve bytes", "output_tokens": 3}\n{"prompt": "five.", "output_tokens": 4}\n')
    data = ["--dataset-name", "custom", "--dataset-path", path, "--custom-output-len", -1, "--num-prompts", 2]
    printed, fields = bench("throughput", *data)
    assert (fields["num_requests"], fields["total_input_tokens"], fields["total_output_tokens"]) == (2, 17, 7)
    assert fields["total_num_tokens"] == 24
    seconds = fields["elapsed_time"]
    assert fields["requests_per_second"] == pytest.approx(2 / seconds)
    assert fields["tokens_per_second"] == pytest.approx(24 / seconds)
    assert fields["output_throughput"] == pytest.approx(7 / seconds)
    rates = [
        f"{count / seconds:.2f} {what}/s"
        for count, what in ((2, "requests"), (24, "total tokens"), (7, "output tokens"))
    ]
    assert printed.startswith(f"Throughput: {', '.join(rates)}\n")
    assert "Total num prompt tokens:  17 " in printed
    assert "Total num output tokens:  7\n" in printed
    assert {"machine", "commit", "command", "versions", "date"} <= fields.keys()
    assert (fields["dtype"], fields["device"]) == ("float32", "cpu")


def test_a_chat_is_its_texts(bench, tmp_path):
    """Without a template; "turns" ask for the first of them."""
    chat = {"messages": [{"role": role, "content": "abc"} for role in ("user", "assistant", "user")]}
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (chat, {"turns": ["abcd", "never asked"]})))
    data = ["--dataset-name", "custom", "--dataset-path", path, "--num-prompts", 2, "--output-len", 1]
    assert bench("throughput", *data)[1]["total_input_tokens"] == len("abc\nabc\nabc") + len("abcd")


def test_what_cannot_be_measured_is_told(tiny_model, tmp_path):
    path = tmp_path / "prompts.jsonl"
    command = ["bench", "throughput", *ENGINE, str(tiny_model), "--num-prompts", "1"]
    ran = CliRunner().invoke(main, [*command, "--random-input-len", "40000"])
    assert ran.exit_code == 1
    assert "Traceback" not in ran.stderr
    path.write_text('{"prompt": null}')
    ran = CliRunner().invoke(main, [*command, "--dataset-name", "custom", "--dataset-path", str(path)])
    assert (ran.exit_code, "line 1 is not of the form" in ran.stderr) == (1, True)
    ran = CliRunner().invoke(main, ["bench", "prefix", "--simulate", "--trace", str(path)])
    assert (ran.exit_code, "line 1 is not of the form" in ran.stderr) == (1, True)
    ran = CliRunner().invoke(main, [*command, "--page-size", "3"])
    assert ran.exit_code == 2


def test_latency_of_a_batch(bench):
    arguments = ["--batch-size", 3, "--input-len", 20, "--output-len", 4, "--num-iters-warmup", 1, "--num-iters", 5]
    printed, fields = bench("latency", *arguments)
    assert len(fields["latencies"]) == 5
    ordered = sorted(fields["latencies"])
    assert fields["avg_latency"] == pytest.approx(statistics.mean(ordered))
    assert list(fields["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert [fields["percentiles"][each] for each in ("25", "50", "75")] == pytest.approx(ordered[1:4])
    assert fields["output_throughput"] == pytest.approx(3 * 4 / ordered[2])
    assert 0 < fields["median_time_to_first_token"] < ordered[-1]
    assert f"50% percentile latency: {ordered[2]} seconds" in printed


class Core:
    """Turns of two seconds: in each, the tokens of the sequences whose numbers it has; `finish` ends them all."""

    def __init__(self, turns, finish=FinishReason.LENGTH):
        self.scheduler, self.prompts, self.clock = self, [], 0.0
        self._script, self._finish = turns, finish

    def add(self, request):
        self.prompts.append(request)
        self.turns = list(self._script)

    @property
    def has_work(self):
        return bool(self.turns)

    def turn(self):
        self.clock += 2
        updates = []
        for number in self.turns.pop(0):
            last = not any(number in turn for turn in self.turns)
            update = SimpleNamespace(request_id=str(number), tokens=[1], finish=self._finish if last else None)
            updates.append(update)
        return SimpleNamespace(updates=updates)


@pytest.fixture
def scripted(monkeypatch):
    """The latency of a batch of two sequences, on a core of so many turns."""

    def run(core, **settings):
        monkeypatch.setattr(offline.time, "perf_counter", lambda: core.clock)
        monkeypatch.setattr(offline.time, "process_time", lambda: core.clock / 2)
        info = SimpleNamespace(
            vocab_size=9, architecture="", dtype="", device="", num_pages=1, page_size=1, max_num_seqs=2
        )
        llm = SimpleNamespace(core=core, info=info)
        asked = {"batch_size": 2, "input_len": 30, "output_len": 4, "warmups": 1, "iterations": 2}
        return offline.latency(llm, **asked | settings)

    return run


def test_decode_alone_begins_when_all_have_their_first_token(scripted):
    core = Core([[0], [0, 1], [0, 1], [0, 1], [1]])
    fields = scripted(core)
    assert fields["latencies"] == [10, 10]
    assert fields["median_cpu_time_to_first_token"] == 2
    assert fields["median_cpu_time_per_output_token"] == pytest.approx(2 * 3 / 5)
    assert fields["median_time_to_first_token"] == 4
    assert fields["decode_throughput"] == 5 / 6  # after the fourth second: two, two and one
    assert fields["median_time_per_output_token"] == pytest.approx(2 / (5 / 6))
    assert len({request.prompt for request in core.prompts}) == 6  # no prompt comes twice
    assert all(len(request.prompt) == 30 and request.params.max_tokens == 4 for request in core.prompts)


def test_decode_alone_of_sequences_one_after_another_is_that_of_the_last(scripted):
    fields = scripted(Core([[0]] * 4 + [[1]] * 4))
    assert fields["decode_throughput"] == 3 / 6
    assert scripted(Core([[0, 1]]), output_len=1)["decode_throughput"] is None


def test_a_batch_that_does_not_run_at_once_or_to_its_end_is_no_measurement(scripted):
    with pytest.raises(LoadTestError, match=r"batch of 3 .* --max-num-seqs is 2"):
        scripted(Core([[0, 1, 2]]), batch_size=3, output_len=1)
    with pytest.raises(LoadTestError, match="sequence 1 ended with LENGTH after 3 of 4"):
        scripted(Core([[0, 1]] * 3 + [[0]]))
    with pytest.raises(LoadTestError, match="sequence 0 ended with ERROR"):
        scripted(Core([[0, 1]] * 4, FinishReason.ERROR))


def test_throughput_of_an_answer_that_broke_is_none():
    completion = SimpleNamespace(token_ids=[1, 2], finish=FinishReason.ERROR)
    llm = SimpleNamespace(generate=lambda *_: [SimpleNamespace(completions=[completion], cached_tokens=0)])
    with pytest.raises(LoadTestError, match="prompt 0 ended with ERROR after 2 of 3 tokens"):
        offline.throughput(llm, [([1], 3)], temperature=1.0, seed=0)
