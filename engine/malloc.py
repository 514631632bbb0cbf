"""How this process's C allocator treats freed memory. Knows no tensors."""

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 1 << 30
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc takes no more


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
