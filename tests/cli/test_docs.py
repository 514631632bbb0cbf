"""The documents name what is there: files, functions, flags, reasons of errors, links."""

import ast
import re
from pathlib import Path

import click
import pytest

from cli.main import main

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


@pytest.mark.parametrize("command", ["serve", "engine", "gateway"])
def test_every_flag_is_documented(command: str) -> None:
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    for param in main.commands[command].params:
        if isinstance(param, click.Option) and not param.hidden:
            assert any(f"`{flag}`" in text for flag in (*param.opts, *param.secondary_opts)), param.opts


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
