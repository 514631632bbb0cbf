"""The documents name what is there: files, functions, flags, reasons, links. What they tell operators has tests."""

import ast
import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from cli.bench import bench
from cli.main import main
from gateway.config import GatewayConfig

ROOT = Path(__file__).parents[2]
ROOMS = ("proto/fulcrum", "telemetry", "kernels", "engine", "service", "gateway", "cli")
FILES = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
# What the life of a request names beside code.
OTHER_WORDS = {"fulcrum serve", "cli", "accepted"}


def defined() -> set[str]:
    """Every class, function, method (Class.method and method), module.function, field, and name of the contract."""
    names: set[str] = set()
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names |= {node.name, f"{path.stem}.{node.name}"}
            elif isinstance(node, ast.ClassDef):
                names.add(node.name)
                for item in node.body:
                    if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                        names |= {item.name, f"{node.name}.{item.name}"}
                    elif isinstance(item, ast.AnnAssign):
                        names.add(ast.unparse(item.target))
    contract = (ROOT / "proto/fulcrum/v1/inference.proto").read_text(encoding="utf-8")
    return names | set(re.findall(r"^\s*(?:message|rpc) (\w+)", contract, re.MULTILINE))


def test_the_life_of_a_request_names_real_files_and_functions() -> None:
    text = (ROOT / "docs/lifecycle.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([^`\n]+)`", text)) - OTHER_WORDS
    files = {name for name in named if name.endswith(".py")}
    assert len(files) > 20
    assert not [name for name in files if not any(path.as_posix().endswith(f"/{name}") for path in FILES)]
    assert not named - files - defined()


OPERATIONS = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
# Pieces of the operators' document, each with the tests that prove it: who changes a sentence meets them, who adds a
# row, a point or a paragraph brings some.
CLAIMS: dict[str, list[str]] = {}
for line in Path(__file__).with_name("operations_claims.txt").read_text(encoding="utf-8").splitlines():
    if line.startswith(" "):
        CLAIMS[list(CLAIMS)[-1]].append(line.strip())
    elif line and not line.startswith("# "):
        assert line not in CLAIMS, line
        CLAIMS[line] = []


def pieces() -> Iterator[str]:
    """Paragraphs, points of lists and rows of tables, without headings; of the table of metrics nothing."""
    text = re.sub(r"(?ms)^```.*?^```$|^\| metric \|.*?\n\n", "", OPERATIONS)
    text = re.sub(r"(?m)^\|.*\|\n\|[-|]+\|$", "", text)
    for piece in re.split(r"\n(?=\n|#|- |\|)", text):
        if piece.strip() and not piece.strip().startswith("#"):
            yield " ".join(piece.split())


@functools.cache
def functions(file: str) -> set[str]:
    """The tests in a file below tests/."""
    path = ROOT / "tests" / file
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else ()
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_piece_of_the_document_has_a_claim_with_tests() -> None:
    assert [piece for piece in pieces() if not any(claim in piece for claim in CLAIMS)] == []


def test_every_claim_is_still_there() -> None:
    text = " ".join(OPERATIONS.split())
    assert [claim for claim in CLAIMS if claim not in text] == []


def test_every_named_test_is_there() -> None:
    assert [claim for claim, tests in CLAIMS.items() if not tests] == []
    named = {test for tests in CLAIMS.values() for test in tests}
    assert [test for test in sorted(named) if test.split("::")[1] not in functions(test.split("::")[0])] == []


def test_the_audit_is_a_target() -> None:
    target = re.search(r"(?m)^audit:.*\n(\t.*\n)+", (ROOT / "Makefile").read_text()).group(0)
    assert "pip-audit" in target
    assert "make audit" not in (ROOT / ".ci/run").read_text()


def default(option: click.Option) -> str:
    """As the table of flags has it. What has none of its own, or one that depends, says so itself."""
    if isinstance(option.show_default, str):
        return option.show_default.partition(";")[0]
    value = option.default
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value) if isinstance(value, int | str) else ""


def test_the_flags_are_as_they_are_documented() -> None:
    """Each in one row: its default, and whether it is the engine's or the gateway's."""
    text = OPERATIONS.partition("## Flags")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `--")]
    told = {}
    for flags, values, rooms, _ in rows:
        named = re.findall(r"`(--[\w-]+)`", flags)
        for at, flag in enumerate(named):  # a cell is of all of them, or has something for each
            assert flag not in told
            cells = (values.split(", "), rooms.partition(";")[0].replace("both", "engine and gateway").split(", "))
            told[flag] = [each[at if len(each) == len(named) else 0] for each in cells]
    del told["--logits-processors"]  # another name
    here = {"engine": set(), "gateway": set()}
    for command in ("serve", "engine", "gateway"):
        for param in main.commands[command].params:
            if isinstance(param, click.Option) and not param.hidden:
                (flag,) = {*param.opts, *param.secondary_opts} & set(told)
                value, rooms = told[flag]
                if default(param):
                    assert value.partition(";")[0] == default(param), flag
                else:
                    assert not re.match(r"\d|on$|off$", value), flag
                here.get(command, set()).add(flag)
                assert command in rooms or command == "serve", flag
    assert here == {room: {flag for flag, (_, rooms) in told.items() if room in rooms} for room in here}
    assert f"| engine none, gateway {GatewayConfig().request_timeout:g} s |" in text


def commands() -> Iterator[tuple[str, list[str]]]:
    """Each `fulcrum ...` line of the documents' shell blocks, with its words."""
    for document in DOCUMENTS:
        for block in re.findall(r"(?ms)^```sh\n(.*?)^```", document.read_text(encoding="utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(re.sub(r"^([A-Z_]+=\S+ )+", "", line), comments=True)
                if words[:1] == ["fulcrum"]:
                    yield line, words[1:]


def test_every_option_of_a_documented_line_is_real() -> None:
    lines = list(commands())
    assert len(lines) > 20
    for line, words in lines:
        command = bench.commands[words[1]] if words[0] == "bench" else main.commands[words[0]]
        known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert options <= known, line


def test_every_reason_is_documented() -> None:
    reasons = set()
    for path in (ROOT / "service").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ApiError":
                reason = node.args[1]
                assert isinstance(reason, ast.Constant), ast.unparse(node)
                reasons.add(reason.value)
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    table = text.partition("# The gRPC API")[2].partition("## Errors")[2]
    documented = set(re.findall(r"`([A-Z]+(?:_[A-Z]+)*)`", table))
    assert reasons == documented


def test_every_error_code_of_the_gateway_is_documented() -> None:
    codes = set()
    for path in (ROOT / "gateway").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "code" and isinstance(node.value, ast.Constant):
                codes.add(node.value.value)
    assert len(codes) > 15
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8").partition("# The gRPC API")[0].partition("## Errors")[2]
    assert not codes - set(re.findall(r"`([a-z_]+)`", text))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), target
