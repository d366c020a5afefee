"""Run the kernels of `27` without a GPU: what Gluon offers, in torch, one program after another. Layouts are ignored."""

import importlib.util
import types
from typing import Any
from unittest import mock

import torch

from afno.kernels import hopper
from afno.kernels import rows as compiled


class Held(torch.Tensor):
    "A tensor that knows of a layout."

    type: Any = types.SimpleNamespace(layout=None)


def held(x: Any) -> Held:
    return torch.as_tensor(x).as_subclass(Held)


class Pointer:
    "Where numbers stand; what is read and written lies inside, and is written once."

    def __init__(self, data: torch.Tensor, at: Any = 0, writes: torch.Tensor | None = None):
        whole = data.as_strided((data.untyped_storage().nbytes() // data.itemsize,), (1,), 0)
        self.data, self.at, self.dtype = whole, at + data.storage_offset(), types.SimpleNamespace(element_ty=data.dtype)
        self.writes = torch.zeros(data.numel(), dtype=torch.int64) if writes is None else writes

    def __add__(self, more):
        return Pointer(self.data, self.at + more, self.writes)

    def spots(self, mask):
        at, ok = torch.broadcast_tensors(held(self.at), held(True if mask is None else mask))
        assert ((at >= 0) & (at < self.data.numel()))[ok].all(), "outside"
        return torch.where(ok, at, 0), ok

    def load(self, mask=None, other=0.0):
        at, ok = self.spots(mask)
        return held(torch.where(ok, self.data.view(-1)[at], other))

    def store(self, value, mask=None):
        at, ok = self.spots(mask)
        self.writes += torch.bincount(at[ok], minlength=self.writes.numel())
        self.data.view(-1)[at[ok]] = torch.broadcast_to(value, at.shape)[ok].to(self.data.dtype)


class Shared:
    "Shared memory."

    def __init__(self, dtype, shape, layout=None):
        self.data, self.dtype = torch.full(shape, torch.nan, dtype=dtype).as_subclass(Held), dtype

    def index(self, i):
        part = Shared(self.dtype, [0])
        part.data = self.data[int(i)]
        return part

    def load(self, layout=None):
        return self.data.clone()

    def store(self, value):
        self.data.copy_(value)


class Copies:
    "As `async_copy`: what is copied arrives when it is waited for, and not before."

    def __init__(self):
        self.started, self.groups = [], []

    def async_copy_global_to_shared(self, shared, pointer, mask):
        self.started.append((shared, pointer, mask))

    def commit_group(self):
        self.groups.append(self.started)
        self.started = []

    def wait_group(self, later):
        while len(self.groups) > later:
            for shared, pointer, mask in self.groups.pop(0):
                shared.store(pointer.load(mask))


def multiply(a, b, acc, use_acc=True, is_async=False):
    "As `warpgroup_mma`."
    return acc * bool(use_acc) + held(a.data) @ b.data


def stand_in(real: torch.dtype) -> dict[str, Any]:
    "What kernels import, with one program and sums in `real`."
    nothing = lambda *a, **k: None  # noqa: E731
    gl = types.SimpleNamespace(
        constexpr=Any, int64=torch.int64, float32=real, static_range=range, program_id=lambda i: held(0), num_programs=lambda i: held(1),
        BlockedLayout=nothing, SliceLayout=nothing, NVMMADistributedLayout=nothing, NVMMASharedLayout=nothing,
        arange=lambda a, b, layout: held(torch.arange(a, b)), zeros=lambda shape, dt, layout: held(torch.zeros(shape, dtype=dt)),
        zeros_like=torch.zeros_like, where=torch.where, convert_layout=lambda x, layout: x, allocate_shared_memory=Shared,
        minimum=lambda a, b: torch.minimum(held(a), held(b)), maximum=lambda a, b: torch.maximum(held(a), held(b)),
        load=lambda p, mask=None, other=0.0: p.load(mask, other), store=lambda p, v, mask=None: p.store(v, mask),
        join=lambda a, b: torch.stack([a, b], -1), split=lambda x: x.unbind(-1),
        warp_specialize=lambda workers, *_: [worker(*given) for worker, given in workers],
    )  # fmt: skip
    copy = Copies()
    return dict(
        gl=gl, async_copy=copy, barrier=nothing, fence_async_shared=nothing, warpgroup_mma=multiply,
        warpgroup_mma_wait=lambda n, deps: deps if len(deps) > 1 else deps[0],
        gluon_constant=lambda f: f, gluon_jit=lambda *names: lambda f: f,
    )  # fmt: skip


class Launch:
    "A launch of one program, which writes every number of the second tensor once and leaves no copy on its way."

    copies: Copies

    def __init__(self, kernel, programs, *numbers, G, **constants):
        self.kernel, self.numbers, self.G = kernel, numbers, G

    def __call__(self, *tensors):
        given = [Pointer(t) for t in tensors]
        self.kernel(*given, *map(held, self.numbers), G=self.G)
        assert (given[1].writes == 1).all()
        assert not self.copies.groups and not self.copies.started


def rows_on_torch() -> Any:
    "Load `27` with kernels that are Python functions, and launches that call them. Sums are float64."
    with mock.patch.multiple(hopper, **(names := stand_in(torch.float64))):
        spec = importlib.util.spec_from_file_location(compiled.__name__, compiled.__file__)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    Launch.copies = names["async_copy"]
    module.__dict__["Launch"] = Launch
    return module
