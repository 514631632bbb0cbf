"""As much of Gluon in plain Python as `kernels.gpu.hopper_attention` asks for: its kernel runs on a CPU, unchanged.

Programs and their partitions are threads. Copies are done by other threads, some time after they were begun; products
when they are waited for, and then their operands must be what they were, and stores to them fenced. Barriers are those
of PTX: arrivals, bytes and phases. Layouts mean nothing here.
"""

import contextlib
import contextvars
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.experimental.gluon import language
from triton.experimental.gluon._runtime import GluonJITFunction

_program: contextvars.ContextVar[tuple[int, int]] = contextvars.ContextVar("program")
_products: contextvars.ContextVar[deque["Product"]] = contextvars.ContextVar("products")
_unfenced: contextvars.ContextVar[set[int]] = contextvars.ContextVar("unfenced")
# Integers are for other partitions: they see them when the one that stored them arrives somewhere, and no sooner.
_unseen: contextvars.ContextVar[list[tuple[Tensor, Tensor]]] = contextvars.ContextVar("unseen")
_atomic = threading.Lock()


class Pointer:
    """To an element of a tensor's memory, or to many."""

    def __init__(self, memory: Tensor, at: Any = 0) -> None:
        self.memory, self.at, self.dtype = memory, at, SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.at + offset)


class Shared:
    """Shared memory, or (of a descriptor) the rows of a tensor."""

    layout = None

    def __init__(self, values: Tensor) -> None:
        self.values, self.dtype = values, values.dtype

    def index(self, i: int) -> "Shared":
        return Shared(self.values[int(i)])

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.values.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: None) -> "Shared":
        return Shared(self.values.view(shape))

    def load(self, layout: Any) -> Tensor:
        return self.values.clone()

    def store(self, values: Tensor) -> None:
        assert values.dtype == self.dtype
        if values.is_floating_point():
            self.values.copy_(values)
            _unfenced.get().add(self.values.data_ptr())
        else:
            _unseen.get().append((self.values, values))


class Barrier:
    """An mbarrier: a phase ends when all have arrived and no bytes are awaited."""

    def init(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = self.phase = 0
        self.changed = threading.Condition()

    def count_down(self, arrivals: int, size: int) -> None:
        with self.changed:
            self.pending -= arrivals
            self.bytes -= size
            assert self.pending >= 0
            if self.pending == 0 and self.bytes == 0:
                self.phase, self.pending = self.phase ^ 1, self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase != int(parity), 20), "deadlock"


class Product:
    """A product in flight."""

    def __init__(self, a: Any, b: Shared, acc: Any, use_acc: bool) -> None:
        self.a, self.b = (a.values if isinstance(a, Shared) else a), b.values
        assert not _unfenced.get() & {self.a.data_ptr(), self.b.data_ptr()}
        self.before = self.a.clone(), self.b.clone()
        self.acc, self.use_acc, self.result = acc, use_acc, None

    def end(self) -> None:
        for now, before in zip((self.a, self.b), self.before, strict=True):
            assert torch.equal(now.view(torch.int16), before.view(torch.int16)), "changed while it was read"
        acc = self.acc.result if isinstance(self.acc, Product) else self.acc
        self.result = self.a.float() @ self.b.float() + (acc if self.use_acc else 0)


def _load(pointer: Pointer, mask: Tensor | None = None, other: float = 0) -> Tensor:
    at = torch.as_tensor(pointer.at)
    return pointer.memory[at] if mask is None else torch.where(mask, pointer.memory[torch.where(mask, at, 0)], other)


def _store(pointer: Pointer, values: Any, mask: Tensor | None = None) -> None:
    if mask is None:
        pointer.memory[pointer.at] = values
    else:
        mask = mask.expand(values.shape)
        pointer.memory[pointer.at[mask]] = values[mask]


def _atomic_add(pointer: Pointer, value: int, sem: str) -> Tensor:
    with _atomic:
        before = pointer.memory[pointer.at].clone()
        pointer.memory[pointer.at] += value
    return before


def _allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
    if layout is Barrier:
        barriers = [Barrier() for _ in range(shape[0])]
        return SimpleNamespace(index=lambda i: barriers[int(i)])
    return Shared(torch.full(shape, torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min, dtype=dtype))


def _multiply(a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
    assert is_async
    _products.get().append(Product(a, b, acc, use_acc))
    return _products.get()[-1]


def _arrive(barrier: Barrier) -> None:
    for place, values in _unseen.get():
        place.copy_(values)
    _unseen.get().clear()
    barrier.count_down(1, 0)
    time.sleep(0.0001)  # for the other partitions to overwrite what is read too late


def _wait(outstanding: int, deps: tuple[Product, ...]) -> Any:
    time.sleep(0.001)  # for the other partitions to overwrite what was released too early
    while len(_products.get()) > outstanding:
        _products.get().popleft().end()
    results = tuple(product.result for product in deps)
    assert all(result is not None for result in results)
    return results if len(results) > 1 else results[0]


def _specialize(partitions: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    def run(function: Any, args: tuple[Any, ...]) -> None:
        _products.set(deque())
        _unfenced.set(set())
        _unseen.set([])
        function(*args)
        assert not _products.get()
        assert not _unseen.get()

    with ThreadPoolExecutor(len(partitions)) as threads:
        runs = [threads.submit(contextvars.copy_context().run, run, *each) for each in partitions]
    for each in runs:
        each.result()


class Launcher:
    """What `kernel[grid](...)` does; a processor runs one program at a time (None: there are as many as programs)."""

    def __init__(self, kernel: Any, processors: int | None) -> None:
        self.kernel, self.processors = kernel, processors

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*args: Any, num_warps: int, **options: Any) -> None:
            def memory(tensor: Tensor) -> Tensor:
                return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,))

            args = tuple(Pointer(memory(each)) if isinstance(each, Tensor) else each for each in args)

            def run(program: int) -> None:
                _program.set((program, *grid))
                self.kernel(*args, **options)

            with ThreadPoolExecutor(self.processors or grid[0]) as threads:
                runs = [threads.submit(contextvars.copy_context().run, run, program) for program in range(*grid)]
            for each in runs:
                each.result()

        return launch


@contextlib.contextmanager
def plainly(module: ModuleType, processors: int | None = None) -> Iterator[None]:
    """Has a module's kernels run in plain Python meanwhile, on so many processors."""
    with ThreadPoolExecutor(2) as copies, pytest.MonkeyPatch.context() as patch:
        for name, value in _stand_ins(module, copies, processors).items():
            patch.setattr(module, name, value)
        yield


def _stand_ins(module: ModuleType, copies: ThreadPoolExecutor, processors: int | None) -> dict[str, Any]:
    def copy(rows: Shared, at: list[int], barrier: Barrier, to: Shared) -> None:
        (line, column), (height, width) = map(int, at), to.values.shape
        part = rows.values[line : line + height, column : column + width]
        assert part.shape == to.values.shape

        def run() -> None:
            to.values.copy_(part)
            barrier.count_down(0, part.nbytes)

        copies.submit(run)

    def pair(function: Any) -> Any:
        return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))

    anything = dict.fromkeys(
        ("SliceLayout", "NVMMADistributedLayout", "BlockedLayout", "DotOperandLayout"), lambda *_: None
    )
    dtypes = {name: getattr(torch, name) for name in ("int32", "int64", "float32")}
    stand_ins: dict[str, Any] = {
        "gl": SimpleNamespace(
            **anything,
            **dtypes,
            NVMMASharedLayout=language.NVMMASharedLayout,
            program_id=lambda _: _program.get()[0],
            num_programs=lambda _: _program.get()[1],
            load=_load,
            store=_store,
            atomic_add=_atomic_add,
            allocate_shared_memory=_allocate,
            warp_specialize=_specialize,
            static_range=range,
            arange=lambda start, end, _: torch.arange(start, end),
            full=lambda shape, value, dtype, _: torch.full(shape, value, dtype=dtype),
            zeros=lambda shape, dtype, _: torch.zeros(shape, dtype=dtype),
            minimum=pair(torch.minimum),
            maximum=pair(torch.maximum),
            max=torch.amax,
            sum=torch.sum,
            exp2=torch.exp2,
            where=torch.where,
            convert_layout=lambda values, _: values,
        ),
        "mbarrier": SimpleNamespace(
            MBarrierLayout=lambda: Barrier,
            init=Barrier.init,
            expect=lambda barrier, size: barrier.count_down(1, -size),
            arrive=_arrive,
            wait=Barrier.wait,
        ),
        "tma": SimpleNamespace(async_copy_global_to_shared=copy),
        "TensorDescriptor": SimpleNamespace(from_tensor=lambda rows, block, layout: Shared(rows)),
        "fence_async_shared": lambda: _unfenced.get(set()).clear(),
        "warpgroup_mma": _multiply,
        "warpgroup_mma_wait": _wait,
    }
    for name, value in vars(module).copy().items():
        if isinstance(value, language.constexpr):
            stand_ins[name] = value.value
        elif isinstance(value, GluonJITFunction):
            stand_ins[name] = Launcher(value.fn, processors) if name.endswith("_kernel") else value.fn
    return stand_ins
