"""The `gateway` extra alone is enough to serve: no torch, no tokenizers, no engine."""

import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import venv

import pytest

CHECK = """
import importlib.util, sys
import gateway.app, gateway.server
for name in ("torch", "tokenizers", "transformers", "numpy", "jinja2", "gguf"):
    assert importlib.util.find_spec(name) is None, name
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"engine", "service", "kernels", "cli"}, loaded
"""


def registry_answers() -> bool:
    """Whether pip's package index can be reached."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    configured = subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()
    index = os.environ.get("PIP_INDEX_URL") or configured or "https://pypi.org/simple"
    try:
        with urllib.request.urlopen(f"{index.rstrip('/')}/fastapi/", timeout=10):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


@pytest.mark.timeout(300)
def test_the_gateway_extra_alone_serves(tmp_path, kit, engine, http, start_gateway):
    if os.environ.get("CI") != "true" and not registry_answers():
        pytest.skip("the package registry cannot be reached")
    source, home = tmp_path / "source", tmp_path / "venv"
    junk = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "tests", "build", "dist")
    shutil.copytree(kit.ROOT, source, ignore=junk)
    venv.create(home)
    python = str(home / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python]
    subprocess.run(
        [*pip, "install", "-q", "--no-compile", "-c", source / "constraints.txt", f"{source}[gateway]"],
        check=True,
        timeout=240,
        cwd=tmp_path,
    )
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([python, "-c", CHECK], check=True, timeout=60, cwd=tmp_path, env=clean)
    with start_gateway(engines=[engine.address], python=python, installed=True) as url:
        answer = http.post(f"{url}/v1/chat/completions", json=kit.CHAT)
        assert answer.json()["choices"][0]["message"]["content"] == "Hello world"
        assert http.get(f"{url}/metrics").status_code == 200
        assert "<title>Fulcrum</title>" in http.get(url).text
