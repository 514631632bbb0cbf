"""What a load's parent makes of its workers: their count of ended requests, and that one of them was killed."""

import multiprocessing
import os
import struct
from types import SimpleNamespace

import pytest

from loadtest.generator import _supervise
from loadtest.records import LoadTestError
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


@pytest.mark.parametrize("sent", [b"", struct.pack("!i", 1000) + b"the first bytes of a pickled report"])
def test_a_worker_that_is_killed_is_told_also_in_the_midst_of_its_report(sent):
    reports, reply = multiprocessing.Pipe(duplex=False)
    os.write(reply.fileno(), sent)  # the length of a message, and not all of it
    reply.close()
    killed = SimpleNamespace(join=lambda seconds: None, exitcode=-9)
    board = SimpleNamespace(start=SimpleNamespace(value=1.0), ended=SimpleNamespace(value=0))
    with pytest.raises(LoadTestError, match="a worker process ended with status -9"):
        _supervise({reports: killed}, board, Outcome(), Load([0.0]), interrupts=[], progress=lambda count: None)
