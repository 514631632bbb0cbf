"""What becomes of freed memory. Python's collector has little to do: it looks at everything that waits for a token."""

import asyncio
import ctypes
import gc

# mallopt's names (malloc.h), and the most that glibc takes for the second.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _LARGEST_MMAP_THRESHOLD = 1 << 30, 32 << 20
# Objects that are made beyond those that end until the collector looks at the youngest: with the 700 that Python begins
# with, a token of each of some hundred streams set it off, and what waits for the next token was old within a second.
_YOUNG, _MIDDLE, _OLD = 10_000, 20, 20
_TRIM_SECONDS = 10.0


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


def keep_freed_memory() -> None:
    """Lets glibc keep up to 1 GiB of freed memory, and take blocks of up to 32 MiB from it.

    Otherwise a step's temporaries go back to the system at its end and are faulted in again, zeroed, by the next: for
    16 sampled rows of 49,152 logits that was 9,700 page faults a step, and a tenth of its time. Does nothing where the
    C library has no mallopt (musl, macOS).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)


async def give_back_freed_memory() -> None:
    """Every ten seconds the system gets back what glibc keeps of freed memory, which is all below what is still used.

    Of 48 refused messages of 16 MB that was 0.9 GB. Where there is nothing to give it takes 0.2 ms, beside 200 streams.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim is not None:
        await asyncio.sleep(_TRIM_SECONDS)
        await asyncio.to_thread(trim, 0)
