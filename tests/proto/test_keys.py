"""Keys: the file's lines, what they mean, and changes while a server runs."""

import hashlib
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from fulcrum.keys import Key, KeyRing, bearer, digest, read_keys

# What `printf %s sk-1 | sha256sum` prints.
SK_1 = "0f2c10bf3d128c719c6bfa4ecbae94b7fceebaea6e4438fef38a90e5acc326f3"


def hashed(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def test_lines(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(
        f"# ours\n\nacme {hashed('one')}\n  beta.b {hashed('two')} admin priority=-7 # Ada's\n"
        f"gw {hashed('three')} gateway\n"
    )
    one, two, three = read_keys(path)
    assert one == Key("acme", digest("one"))
    assert two == Key("beta.b", digest("two"), -7, admin=True)
    assert three == Key("gw", digest("three"), gateway=True)
    path.write_text("\n".join(key.line() for key in (one, two, three)))
    assert read_keys(path) == [one, two, three]


@pytest.mark.parametrize(
    "line",
    [
        "sk-a-plain-key",
        f"{hashed('x')}",
        f"acme {hashed('x')[:-1]}",
        f"acme {hashed('x').upper()}",
        f"a/b {hashed('x')}",
        f"{'a' * 65} {hashed('x')}",
        f"acme {hashed('x')} priority=high",
        f"acme {hashed('x')} root",
        "acme \xff",
    ],
)
def test_a_wrong_line_is_named_but_not_shown(tmp_path: Path, line: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"# first\n" + line.encode("latin-1"))
    with pytest.raises(ValueError, match="line 2: ") as caught:
        KeyRing(path=path)
    assert line not in str(caught.value)


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        KeyRing(path=tmp_path / "none")
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(ValueError, match="there is no key in it"):
        KeyRing(path=tmp_path / "empty")


def test_keys_given_without_a_file() -> None:
    assert KeyRing().open
    ring = KeyRing(["one"], gateway_keys=["two"])
    assert not ring.open
    assert ring.find("one") == Key("default", digest("one"))
    assert ring.find("two") == Key("default", digest("two"), gateway=True)
    assert [ring.find(each) for each in ("", "on", "one ", "\udcff")] == [None] * 4
    for bad in ("", "a b", "naïve", "a\n"):
        with pytest.raises(ValueError, match="api_keys"):
            KeyRing([bad])


@pytest.mark.parametrize(
    ("header", "key"),
    [("Bearer k", "k"), ("bearer   k ", "k"), ("Basic k", None), ("Bearer", None), ("k", None), (None, None)],
)
def test_bearer(header: str | None, key: str | None) -> None:
    assert bearer(header) == key


@pytest.mark.parametrize("how", ["written", "replaced"])
def test_a_changed_file_counts_within_a_second(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    now = 100.0
    monkeypatch.setattr("fulcrum.keys.time", SimpleNamespace(monotonic=lambda: now))

    def write(text: str) -> None:
        if how == "written":
            path.write_text(text)
        else:
            (tmp_path / "new").write_text(text)
            os.replace(tmp_path / "new", path)

    def known() -> list[str]:
        nonlocal now
        now += 0.99
        return [key for key in ("one", "two", "thr", "given") if ring.find(key)]

    write(f"a {hashed('one')}\nb {hashed('two')}\n")
    ring = KeyRing(["given"], path)
    assert known() == ["one", "two", "given"]
    write(f"a {hashed('thr')}\nb {hashed('two')}\n")  # of the same size
    assert known() == ["two", "thr", "given"]
    # A broken file, one that is being written, or none, takes nobody's key away, and is told once.
    write("")
    assert known() == ["two", "thr", "given"]
    write("a sha256:")
    assert known() == known() == ["two", "thr", "given"]
    path.unlink()
    assert known() == known() == ["two", "thr", "given"]
    assert [record.levelname for record in caplog.records].count("ERROR") == 1
    # One without keys takes them all, and opens nothing.
    write("# nobody\n")
    assert known() == ["given"]
    assert not ring.open


def test_hash_is_what_other_tools_print() -> None:
    assert digest("sk-1").hex() == SK_1
