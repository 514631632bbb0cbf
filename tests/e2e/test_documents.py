"""Every line and program that the documents tell a user to run, run against the default model."""

import ast
import contextlib
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
# What `make serve` finds on PATH for grpcurl is the environment's own. No proxy stands before a server of one's own.
PATHS = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NO_PROXY": "127.0.0.1"}


class Block(NamedTuple):
    """A fenced piece of a document."""

    heading: str
    language: str
    text: str


class Ran(NamedTuple):
    """What a line did."""

    line: str
    status: int
    out: str
    err: str

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The JSON objects that it printed one after the other."""
        decoder, found, rest = json.JSONDecoder(), [], self.out.strip()
        while rest:
            message, end = decoder.raw_decode(rest)
            found.append(message)
            rest = rest[end:].strip()
        return found

    @property
    def text(self) -> str:
        """The text of a Generate."""
        return "".join(each["delta"].get("text", "") for each in self.messages if "delta" in each)

    @property
    def token_ids(self) -> list[int]:
        """The token ids of a Generate."""
        return [token for each in self.messages for token in each.get("delta", {}).get("token_ids", ())]


def blocks(document: str) -> list[Block]:
    """The fenced pieces, each with the heading that it stands under."""
    found, heading = [], ""
    pattern = r"^#+ (?P<heading>[^\n]*)$|^```(?P<language>\w+)\n(?P<text>.*?)^```$"
    for match in re.finditer(pattern, (ROOT / document).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        heading = match["heading"] or heading
        if match["language"]:
            found.append(Block(heading, match["language"], match["text"]))
    return found


@pytest.fixture(scope="module")
def here(served: Any) -> Callable[[str], str]:
    """The text of a document with this server's addresses and model."""

    def place(text: str) -> str:
        for written, real in {
            "127.0.0.1:50051": served.grpc,
            "http://127.0.0.1:8000": served.http,
            "ADMIN_SOCKET": served.admin.removeprefix("unix:"),
            "SmolLM2-135M-Instruct": served.model,
        }.items():
            text = text.replace(written, real)
        return text

    return place


@pytest.fixture(scope="module")
def run(here: Callable[[str], str]) -> Callable[[str], list[Ran]]:
    """Runs the lines of a piece of shell, together."""

    def one(line: str) -> Ran:
        done = subprocess.run(
            ["sh", "-c", here(line)],
            env=os.environ | PATHS,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return Ran(line, done.returncode, done.stdout, done.stderr)

    def lines(text: str) -> list[Ran]:
        whole = text.replace("\\\n", " ").splitlines()
        with ThreadPoolExecutor(len(whole)) as pool:
            return list(pool.map(one, whole))

    return lines


def execute(pieces: list[Block], here: Callable[[str], str]) -> list[str]:
    """What each piece of Python prints; they go on from one another."""
    names: dict[str, Any] = {"__name__": "__main__"}
    # It writes log lines to standard output, where another test of this process has turned all loggers up.
    logging.getLogger("LiteLLM").setLevel(logging.WARNING)
    printed = []
    for piece in pieces:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(here(piece.text), piece.heading, "exec"), names)
        printed.append(output.getvalue())
    return printed


def ended(ran: Ran, *reasons: str) -> bool:
    """Whether a Generate is whole, and each choice ended for one of these reasons."""
    kinds = [next(iter(each)) for each in ran.messages]
    finished = [each["finished"]["reason"] for each in ran.messages if "finished" in each]
    return (kinds[:2], kinds[-1]) == (["accepted", "started"], "usage") and set(finished) <= set(reasons)


# ----------------------------------------------------------------------------------------------------------------- gRPC


def what_there_is(listed: Ran, service: Ran, message: Ran, model: Ran, without: Ran) -> None:
    assert {"fulcrum.v1.InferenceService", "grpc.health.v1.Health"} <= set(listed.out.split())
    assert (
        "rpc Generate ( .fulcrum.v1.GenerateRequest ) returns ( stream .fulcrum.v1.GenerateResponse );" in service.out
    )
    assert "optional float temperature = 1;" in message.out
    assert model.messages[0]["served_names"] == ["smollm2"]
    assert model.messages[0]["vocab_size"] == 49152
    assert without.messages[0]["servedNames"] == ["smollm2"]


def generate(text: Ran, chat: Ran, ids: Ran, greedy: Ran, sampled: Ran, stopped: Ran, biased: Ran, keyed: Ran) -> None:
    for each in (text, chat, ids, greedy, sampled, biased, keyed):
        assert ended(each, "FINISH_REASON_LENGTH", "FINISH_REASON_STOP"), each
    assert ids.messages[-1]["usage"]["prompt_tokens"] == 4
    assert len(ids.token_ids) == ids.messages[-1]["usage"]["completion_tokens"]
    assert greedy.text.startswith(" 4, 5,")
    assert {each["finished"].get("index", 0) for each in sampled.messages if "finished" in each} == {0, 1}
    assert stopped.text == " 4, 5"
    assert next(each["finished"]["stop"] for each in stopped.messages if "finished" in each) == " 5"
    assert 655 not in biased.token_ids  # " time", which a greedy answer begins with
    assert len(biased.token_ids) == 4


def tokens(text: Ran, chat: Ran, back: Ran) -> None:
    assert text.messages[0]["token_ids"] == [6403, 1980, 253, 655]
    assert len(chat.messages[0]["token_ids"]) > 5  # the template's own are among them
    assert back.messages == [{"text": "Once upon a time"}]


def speculation(without: Ran) -> None:
    assert ended(without, "FINISH_REASON_LENGTH", "FINISH_REASON_STOP")


def health(whole: Ran, one: Ran, watched: Ran) -> None:
    assert whole.messages == one.messages == watched.messages == [{"status": "SERVING"}]
    assert watched.status == 64 + 4  # its deadline has passed


def administration(listed: Ran, stats: Ran, watched: Ran, aborted: Ran, flushed: Ran) -> None:
    assert "fulcrum.v1.AdminService" in listed.out.split()
    assert int(stats.messages[0]["stats"]["total_pages"]) > 0
    assert len(watched.messages) >= 2
    assert watched.status == 64 + 4
    assert aborted.messages[0]["results"] == [{"request_id": "no-such-request", "outcome": "OUTCOME_NOT_FOUND"}]
    assert flushed.status == 0


def errors(ranges: Ran, model: Ran, window: Ran) -> None:
    assert (ranges.status, model.status, window.status) == (64 + 3, 64 + 5, 64 + 3)
    for field in ("sampling.temperature", "stopping.max_tokens"):
        assert f'"field":"{field}"' in ranges.err
    assert "MODEL_NOT_FOUND" in model.err
    assert "CONTEXT_LENGTH_EXCEEDED" in window.err


GRPC = {
    "What there is": what_there_is,
    "Generate": generate,
    "Tokens": tokens,
    "Speculation": speculation,
    "Health": health,
    "Administration": administration,
    "Errors": errors,
}


@pytest.mark.parametrize("heading", GRPC)
def test_grpcurl_lines(heading: str, run: Callable[[str], list[Ran]]) -> None:
    ran = run("".join(block.text for block in blocks("docs/grpc.md") if block.heading == heading))
    if heading not in ("Errors", "Health", "Administration"):
        assert [each for each in ran if each.status] == []
    GRPC[heading](*ran)


def test_every_grpcurl_line_is_run() -> None:
    assert {block.heading for block in blocks("docs/grpc.md") if block.language == "sh"} == {*GRPC, "Node"}


def test_python_over_grpc(here: Callable[[str], str]) -> None:
    streamed, whole = execute([block for block in blocks("docs/grpc.md") if block.language == "python"], here)
    assert streamed
    answer, refusal = whole.rstrip().rsplit("\n", 1)
    assert answer.endswith(" 16")
    assert refusal.startswith("INVALID_ARGUMENT INVALID_PARAMETER (('sampling.temperature',")


# ------------------------------------------------------------------------------------------------------------ examples/


def example(name: str, *arguments: str) -> str:
    command = [sys.executable, f"examples/{name}.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout


def test_example_sync(served: Any) -> None:
    model, ids, whole, streamed, refused = example("grpc_sync", served.grpc).splitlines()
    assert model == "model: smollm2 window: 8192"
    assert ids == "tokens: [6403, 1980, 253, 655]"
    assert whole.removeprefix("whole: ").removesuffix(" tokens: 16") == streamed.removeprefix("streamed: ")
    told = "'must be at least 1 (or 0, with prompt_logprobs)'"
    assert refused == f"refused: INVALID_ARGUMENT INVALID_PARAMETER ('stopping.max_tokens', {told})"


def test_example_async(served: Any) -> None:
    lines = example("grpc_async", served.grpc).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["fox", "fox", "crow", "crow", "otter", "otter"]
    assert len(set(lines)) == 6


def test_example_chat(served: Any) -> None:
    printed = example("grpc_chat", served.grpc)
    assert printed.count("assistant: ") == 2
    (_, first), (prompt, cached) = (
        map(int, pair) for pair in re.findall(r"\((\d+) prompt tokens, (\d+) of them cached\)", printed)
    )
    assert first < cached < prompt


def test_example_abort(served: Any) -> None:
    left, *lines = example("grpc_abort", served.grpc, served.admin).splitlines()
    assert left.startswith("left after: ")
    assert lines == [
        "task cancelled: True",
        "deadline: DEADLINE_EXCEEDED",
        "abort: OUTCOME_ABORTED",
        "its caller sees: ABORTED ABORTED",
    ]


@pytest.fixture
def node_examples(npm_ci: Callable[[Path], None], tmp_path: Path) -> Path:
    """The checkout's folders that the example needs, with the packages of its lock file."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("node_modules"))
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    npm_ci(tmp_path / "examples/node")
    return tmp_path


def test_example_node(served: Any, node_examples: Path) -> None:
    (line,) = [block.text for block in blocks("docs/grpc.md") if block.heading == "Node"]
    install, _, start = line.strip().partition(" && ")
    assert install == "npm ci --prefix examples/node"
    command = ["sh", "-c", start.replace("127.0.0.1:50051", served.grpc)]
    done = subprocess.run(command, cwd=node_examples, capture_output=True, text=True, timeout=120, check=True)
    assert "ravity" in done.stdout
    assert done.stdout.endswith("\n[FINISH_REASON_LENGTH]\n[16 tokens]\n")
    refused = [*command[:2], command[2].replace(served.grpc, "127.0.0.1:1")]
    gone = subprocess.run(refused, cwd=node_examples, capture_output=True, text=True, timeout=120, check=False)
    assert gone.returncode == 1
    assert gone.stderr.startswith("UNAVAILABLE: ")


# ------------------------------------------------------------------------------------------------------------ over HTTP


def test_curl_lines(run: Callable[[str], list[Ran]]) -> None:
    (shell,) = [block.text for block in blocks("docs/clients.md") if block.heading == "curl"]
    models, chat, streamed, text = run(shell)
    assert models.messages[0]["data"][0]["id"] == "smollm2"
    assert chat.messages[0]["usage"]["completion_tokens"] == 16
    assert text.messages[0]["usage"]["completion_tokens"] == 16
    events = [each.removeprefix("data: ") for each in streamed.out.split("\n\n") if each]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["usage"]["completion_tokens"] == 16


def test_the_openai_client(here: Callable[[str], str]) -> None:
    pieces = [block for block in blocks("docs/clients.md") if block.heading == "Python: openai"]
    made, chat, streamed, responses, several, refused, together = execute(pieces, here)
    assert made == ""
    assert "ravity" in chat
    assert streamed.endswith("\n16 tokens\n")
    assert responses.startswith("incomplete ")
    assert len(responses) > 40
    assert len(ast.literal_eval(several)) == 3
    assert refused == "400 invalid_value temperature\nthe client has gone, and the engine stopped\n"
    assert len(ast.literal_eval(together)) == 2


INSTRUCTOR = "Python: instructor"
CLIENTS = [block.heading for block in blocks("docs/clients.md") if block.language in ("python", "yaml", "js")]


@pytest.fixture(scope="module")
def answer(here: Callable[[str], str]) -> str:
    """What every client prints: the text of the openai client's chat."""
    made, chat = [block for block in blocks("docs/clients.md") if block.heading == "Python: openai"][:2]
    return execute([made, chat], here)[1].rpartition(" ")[0] + "\n"


@pytest.mark.parametrize("heading", [each for each in dict.fromkeys(CLIENTS) if each != "Python: openai"])
def test_clients(
    heading: str, answer: str, here: Callable[[str], str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    piece, *lines = [block for block in blocks("docs/clients.md") if block.heading == heading]
    environment = os.environ | PATHS | {"LLM_USER_PATH": str(tmp_path)}
    if piece.language == "js":
        program = request.getfixturevalue("node_clients") / "snippet.mjs"
        program.write_text(here(piece.text))
        command = ["node", program]
    elif piece.language == "yaml":
        (tmp_path / "extra-openai-models.yaml").write_text(here(piece.text))
        command = ["sh", "-c", lines[0].text]
    elif heading == INSTRUCTOR:
        environment |= {"PYTHONPATH": str(request.getfixturevalue("instructor_path"))}
        command = [sys.executable, "-c", here(piece.text)]
    else:
        assert execute([piece], here) == [answer]
        return
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    if heading == INSTRUCTOR:
        assert re.fullmatch(r"kind='(force|field)' attracts=(True|False)\n", done.stdout)
    else:
        assert done.stdout == answer


@pytest.mark.full
def test_the_quickstart(here: Callable[[str], str], run: Callable[[str], list[Ran]]) -> None:
    pieces = [block for block in blocks("README.md") if block.heading == "Quickstart"]
    curl, grpcurl = [run(block.text)[0] for block in pieces if block.language == "sh"]
    assert curl.out.endswith("data: [DONE]\n\n")
    assert ended(grpcurl, "FINISH_REASON_LENGTH", "FINISH_REASON_STOP")
    over_http, over_grpc, offline = execute([each for each in pieces if each.language == "python"], here)
    assert over_http
    assert over_grpc
    assert all(0 < len(ast.literal_eval(line)) <= 16 for line in offline.splitlines())
    assert offline.count("\n") == 2
