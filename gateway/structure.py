"""How much a JSON text holds, counted while its bytes come. Reads no value.

To read a text that is all brackets takes a hundred times its size in memory, and nothing else goes on meanwhile.
"""

from pydantic_core import from_json

from gateway.errors import ApiError

MAX_NODES = 1 << 16  # lists, objects and keys: some 50 ms
MAX_VALUES = 1 << 20  # all entries; the longest windows take as many token ids: 30 ms


class Structure:
    """The counts of one text.

    Attributes:
        nodes: lists, objects and keys.
        values: entries of lists and objects.
    """

    def __init__(self) -> None:
        self.nodes = self.values = 0
        self._in_string = False
        self._cut = b""  # a backslash at the end of what came last

    def add(self, data: bytes) -> None:
        """The next bytes."""
        if self._cut or b"\\" in data:
            data = (self._cut + data).replace(b"\\\\", b"").replace(b'\\"', b"")
            self._cut = b"\\" if data.endswith(b"\\") else b""
            data = data.removesuffix(b"\\")
        runs = data.split(b'"')
        outside = b"".join(runs[self._in_string :: 2])
        self._in_string ^= len(runs) % 2 == 0
        self.nodes += outside.count(b"[") + outside.count(b"{") + outside.count(b":")
        self.values += outside.count(b",")

    def check(self, text: bytearray) -> None:
        """`text`: all that came. Raises: ApiError 400 where that is too much; it names the field that comes last."""
        if self.nodes <= MAX_NODES and self.values <= MAX_VALUES:
            return
        try:
            fields = from_json(bytes(text), allow_partial=True)
        except ValueError:
            fields = None
        param = next(reversed(fields), "")[:200] if isinstance(fields, dict) else None
        where = f"Invalid '{param}': the body" if param else "The body"
        limits = f"{MAX_NODES} lists, objects and keys, or {MAX_VALUES} values"
        raise ApiError(400, f"{where} holds more than {limits}.", param=param or None, code="invalid_value")
