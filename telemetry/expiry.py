"""When a process's certificates expire: read out of their PEM files, told in the log in time, and as a metric."""

import asyncio
import logging
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)

_DAY = 86400.0
_SOON_DAYS = 14
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


class Certificates(Collector):
    """Files, by the settings that name them: of a chain the first end counts, of authorities (*_ca) the last."""

    def __init__(self, files: Mapping[str, Path | None]) -> None:
        self._files = files

    def ends(self) -> dict[str, float]:
        """Unix times, by settings; none of a file that cannot be read, about which its server says more."""
        found = {}
        for setting, path in self._files.items():
            try:
                texts = [] if path is None else _PEM.findall(path.read_text("ascii", "replace"))
                ends = [not_after(ssl.PEM_cert_to_DER_cert(text)) for text in texts]
            except (OSError, ValueError):
                continue
            if ends:
                found[setting] = max(ends) if setting.endswith("_ca") else min(ends)
        return found

    async def watch(self) -> NoReturn:
        """Logs what has expired or will within 14 days: now, and once a day."""
        while True:
            for setting, end in self.ends().items():
                days = (end - time.time()) / _DAY
                if days < 0:
                    logger.error("%s %s has expired", setting, self._files[setting])
                elif days < _SOON_DAYS:
                    logger.warning("%s %s expires in %.1f days", setting, self._files[setting], days)
            await asyncio.sleep(_DAY)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """For Prometheus."""
        text = "When the certificate that a setting names expires, Unix time."
        gauge = GaugeMetricFamily("fulcrum_certificate_expiry_timestamp_seconds", text, labels=["setting"])
        for setting, end in self.ends().items():
            gauge.add_metric([setting], end)
        yield gauge


def not_after(certificate: bytes) -> float:
    """The Unix time in an X.509 certificate in DER (RFC 5280, 4.1). Raises: ValueError."""
    try:
        ((_, whole),) = _elements(certificate)
        signed = _elements(_elements(whole)[0][1])
        validity = signed[4 if signed[0][0] == 0xA0 else 3][1]  # [0] is the version, which version 1 leaves out
        text = _elements(validity)[1][1].decode("ascii")
    except IndexError as error:
        raise ValueError("this is not a certificate") from error
    if len(text) == len("YYMMDDhhmmssZ"):
        text = ("19" if text >= "5" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _elements(der: bytes) -> list[tuple[int, bytes]]:
    """Tag and content of each element, one after the other. Raises: IndexError where the head of one is cut."""
    found, at = [], 0
    while at < len(der):
        tag, length = der[at], der[at + 1]
        at += 2
        if length > 0x7F:
            size = length - 0x80
            length = int.from_bytes(der[at : at + size], "big")
            at += size
        found.append((tag, der[at : at + length]))
        at += length
    return found
