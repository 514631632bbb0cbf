"""What a model writes commands no terminal."""

import io
import sys

import pytest

from cli.terminal import say

# A title, the clipboard (OSC 52), a colour, the same begun by C1, and what text has.
HOSTILE = "a\x1b]0;owned\x07\x1b]52;c;AAAA\x07\x1b[31mb\x9b2J\x90q\rc\td\ne\x7fé漢"
HARMLESS = "a\ufffd]0;owned\ufffd\ufffd]52;c;AAAA\ufffd\ufffd[31mb\ufffd2J\ufffdq\ufffdc\td\ne\ufffdé漢"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("name", "err"), [("stdout", False), ("stderr", True)])
def test_to_a_terminal_without_commands_and_to_a_file_as_it_is(
    monkeypatch: pytest.MonkeyPatch, name: str, err: bool
) -> None:
    plain = HOSTILE.replace("\x1b[31m", "")  # click takes colours away where there is no terminal
    for stream, shown in ((Terminal(), HARMLESS), (io.StringIO(), plain)):
        monkeypatch.setattr(sys, name, stream)
        say(HOSTILE, err=err)
        assert stream.getvalue() == shown
    terminal = Terminal()
    monkeypatch.setattr(sys, name, terminal)
    say("\x1b[2J", err=err, dim=True)
    assert terminal.getvalue() == "\x1b[2m\ufffd[2J\x1b[0m"
