"""What Python's collector has to do in a server: little, since it looks at everything that waits for a token."""

import gc

# Objects that are made beyond those that end until the collector looks at the youngest: with the 700 that Python begins
# with, a token of each of some hundred streams set it off, and what waits for the next token was old within a second.
_YOUNG, _MIDDLE, _OLD = 10_000, 20, 20


def collect_rarely() -> None:
    """To be called once all is made that lives as long as the process: it is not looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)


def forget_frames(error: BaseException | None) -> None:
    """An error that was told need not keep what its calls held, such as a message of megabytes.

    Frames that hold an error, as those that gather tasks do, are in a ring with it, which the collector alone ends.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
