"""The committed stubs: made of the contract as it stands by the pinned tools, usable with the pinned libraries."""

import re
import subprocess
import sys
from pathlib import Path

import google.protobuf
import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor

from fulcrum.v1 import inference_pb2, inference_pb2_grpc

ROOT = Path(__file__).parents[2]
PROTO = ROOT / "proto"
STUBS = ["inference_pb2.py", "inference_pb2.pyi", "inference_pb2_grpc.py"]


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stubs")
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={PROTO}"]
    command += [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([*command, str(PROTO / "fulcrum/v1/inference.proto")], check=True)
    return out / "fulcrum/v1"


@pytest.mark.parametrize("name", STUBS)
def test_stubs_are_up_to_date(regenerated: Path, name: str) -> None:
    committed = (PROTO / "fulcrum/v1" / name).read_text()
    assert committed == (regenerated / name).read_text(), "inference.proto has changed: run `make proto`"


def test_stubs_are_made_for_the_pinned_libraries() -> None:
    generated = (PROTO / "fulcrum/v1/inference_pb2.py").read_text()
    assert "# Protobuf Python Version: 7.35.1" in generated
    assert inference_pb2_grpc.GRPC_GENERATED_VERSION == "1.84.0"
    # Importing them above has passed the version checks of both libraries; these are the ones it passed on.
    assert grpc.__version__.startswith("1.84.")
    assert google.protobuf.__version__.startswith("7.36.")


def test_buf_lint_passes() -> None:
    buf = Path(sys.executable).with_name("buf")
    result = subprocess.run([buf, "lint"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_package_data_holds_the_contract() -> None:
    """Whoever installs the distribution finds the .proto beside the stubs."""
    assert (Path(inference_pb2.__file__).parent / "inference.proto").is_file()


# The calls and messages of the design, section 3.
METHODS = {
    "InferenceService": {"Generate", "Tokenize", "Detokenize", "GetModel"},
    "AdminService": {"Abort", "GetStats", "WatchStats", "GetTrace", "GetSteps", "GetCache", "FlushCache", "Drain"},
}


@pytest.mark.parametrize("service", METHODS)
def test_services_have_their_methods(service: str) -> None:
    descriptor = inference_pb2.DESCRIPTOR.services_by_name[service]
    assert {method.name for method in descriptor.methods} == METHODS[service]
    streams = {method.name for method in descriptor.methods if method.server_streaming}
    assert streams == METHODS[service] & {"Generate", "WatchStats"}
    assert not any(method.client_streaming for method in descriptor.methods)


@pytest.mark.parametrize("message", ["SamplingParams", "StoppingCriteria", "OutputOptions"])
def test_unset_and_zero_differ(message: str) -> None:
    for field in inference_pb2.DESCRIPTOR.message_types_by_name[message].fields:
        if not field.is_repeated and field.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE:
            assert field.has_presence, f"{message}.{field.name}"


def test_unset_and_zero_differ_on_the_wire() -> None:
    sent = inference_pb2.SamplingParams(temperature=0.0)
    received = inference_pb2.SamplingParams.FromString(sent.SerializeToString())
    assert received.HasField("temperature")
    assert not received.HasField("top_p")


def test_json_travels_as_text() -> None:
    """Key order and big integers survive, which they would not in a google.protobuf.Struct."""
    source = (PROTO / "fulcrum/v1/inference.proto").read_text()
    assert re.findall(r"google\.protobuf\.(Struct|Value|Any)", source) == []
    text = '{"b": 9007199254740993, "a": 1}'
    call = inference_pb2.ToolCall(id="1", name="f", arguments_json=text)
    assert inference_pb2.ToolCall.FromString(call.SerializeToString()).arguments_json == text


def test_events_come_one_at_a_time() -> None:
    event = inference_pb2.DESCRIPTOR.message_types_by_name["GenerateResponse"].oneofs_by_name["event"]
    names = [field.name for field in event.fields]
    assert names == ["accepted", "started", "prompt_logprobs", "delta", "finished", "usage"]
