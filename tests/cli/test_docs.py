"""The documents name what is there: files, functions, flags, reasons of errors, links."""

import ast
import re
from pathlib import Path

import click
import pytest

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
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8").partition("## Flags")[2].partition("\n## ")[0]
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
