"""When certificates expire, as openssl reads them, and what is said of it."""

import asyncio
import logging
import shutil
import ssl
import subprocess
import time

import pytest

from telemetry import expiry
from telemetry.expiry import Certificates


def end_of(path):
    """What openssl says."""
    command = ["openssl", "x509", "-in", path, "-noout", "-enddate"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return ssl.cert_time_to_seconds(told.strip().removeprefix("notAfter="))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """For 400 days (a time of two digits for the year in the certificate), and 100 years (of four)."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make certificates with")
    folder = tmp_path_factory.mktemp("expiring")
    for name, days in (("year", "400"), ("century", "36525")):
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", days, "-subj", "/CN=x"]
        command += ["-keyout", f"{name}.key", "-out", f"{name}.pem"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (folder / "both.pem").write_text(
        "Two of them:\n" + (folder / "century.pem").read_text() + (folder / "year.pem").read_text()
    )
    return folder


def test_ends_are_those_that_openssl_reads(made, certificates, tmp_path):
    year, century, days = end_of(made / "year.pem"), end_of(made / "century.pem"), end_of(certificates / "server.pem")
    assert days < year < century
    cut = tmp_path / "cut.pem"
    cut.write_text((made / "year.pem").read_text()[:400])
    files = {
        "a_cert": certificates / "server.pem", "b_cert": made / "century.pem", "c_cert": made / "both.pem",
        "c_ca": made / "both.pem", "d": None, "e": made / "none.pem", "f": made / "year.key", "g": cut,
    }  # fmt: skip
    assert Certificates(files).ends() == {"a_cert": days, "b_cert": century, "c_cert": year, "c_ca": century}


@pytest.mark.parametrize("content", [b"", b"\x30", b"\x30\x82\xff\xff", b"\x30\x03\x30\x01\x30", b"\x30\x00" * 3])
def test_what_is_not_a_certificate(content, tmp_path):
    (tmp_path / "a.pem").write_text(ssl.DER_cert_to_PEM_cert(content))
    assert Certificates({"a": tmp_path / "a.pem"}).ends() == {}


@pytest.mark.parametrize(
    ("days", "told"),
    [
        (-500.0, []),
        (-15.0, []),
        (-13.75, ["WARNING a_cert {} expires in 13.8 days"]),
        (0.1, ["ERROR a_cert {} has expired"]),
    ],
)
async def test_the_log_says_so_each_day(made, caplog, monkeypatch, days, told):
    """`days`: today, counted from the end."""
    path = made / "year.pem"
    today = end_of(path) + days * 86400
    nights = []

    async def sleep(seconds):
        nights.append(seconds)
        if len(nights) == 2:
            raise EOFError

    monkeypatch.setattr(time, "time", lambda: today)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    caplog.set_level(logging.INFO, expiry.__name__)
    with pytest.raises(EOFError):
        await Certificates({"a_cert": path}).watch()
    assert nights == [86400, 86400]
    lines = [f"{record.levelname} {record.getMessage()}" for record in caplog.records]
    assert lines == [line.format(path) for line in told] * 2
