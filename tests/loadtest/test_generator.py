"""The count of ended requests that a progress bar is told, while workers go on counting."""

import multiprocessing
from types import SimpleNamespace

from loadtest.generator import _supervise
from loadtest.worker import Load, Outcome


class _Ended:
    """A counter that a worker raises after every look at it; at the fifth the worker sends its report."""

    def __init__(self, send):
        self.looks, self.send = 0, send

    @property
    def value(self):
        self.looks += 1
        if self.looks == 5:
            self.send(Outcome())
        return self.looks


def test_what_ends_while_progress_is_told_is_told_next():
    reports, reply = multiprocessing.Pipe(duplex=False)
    board = SimpleNamespace(start=SimpleNamespace(value=1.0), ended=_Ended(reply.send))
    told = []
    _supervise({reports: None}, board, Outcome(), Load([0.0]), interrupts=[], progress=told.append)
    assert sum(told) == board.ended.looks
    assert min(told) >= 0
