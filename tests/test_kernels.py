"""Fused kernels against the plain route in float64: in Triton's interpreter at tiny sizes, on a GPU at real ones."""

import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

GPU = torch.cuda.is_available()  # else conftest.py chose the interpreter
pytest.importorskip("triton")

from afno.kernels import Settings, fused_mix, packed, refusal  # noqa: E402
from afno.kernels.backward import _groups, _steps  # noqa: E402
from afno.kernels.layer import forward, make_plan, spectrum_shape  # noqa: E402
from afno.kernels.mix import Plan, group, pieces  # noqa: E402
from afno.kernels.transforms import INTERPRET, Launch  # noqa: E402
from afno.mixers import AFNO2D  # noqa: E402
from afno.spectral import Modes, block_linear, irfft2, keep_modes, rfft2, soft_shrink  # noqa: E402

interpreted = pytest.mark.skipif(not INTERPRET, reason="kernels are compiled for the GPU here")
on_gpu = pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")


def values(B, H, W, C, K, expansion=1, scale=0.3, device="cpu", dtype=torch.float32, seed=0):
    "Draw tokens, parameters and a gradient."
    g, c = torch.Generator().manual_seed(seed), C // K
    d = int(c * expansion)
    sizes = (B, H, W, C), (2, K, c, d), (2, K, d), (2, K, d, c), (2, K, c), (B, H, W, C)
    x, *weights, out = (torch.randn(*size, generator=g).to(device) for size in sizes)
    return x.to(dtype), [scale * w for w in weights], out.to(dtype)


def plain_mix(x, w1, b1, w2, b2, kept, norm="ortho", centred=False, lam=0.01, kind="parts", add=True):
    "Mix by matrix products, one equation a line."
    z = rfft2(x, kept, norm, centred, "matmul")
    z = soft_shrink(block_linear(torch.relu(block_linear(z, w1, b1)), w2, b2), lam, kind)
    y = irfft2(z, (x.shape[1], x.shape[2]), kept, norm, centred, "matmul")
    return y + x if add else y


def compare(x, weights, out, kept, *settings):
    "Relative errors of the output and of every gradient, against the plain route in float64."
    given = [t.detach().requires_grad_() for t in (x, *weights)]
    y = fused_mix(*given, kept, *settings)
    assert y.dtype == x.dtype and y.shape == x.shape
    exact = [t.detach().double().requires_grad_() for t in given]
    expected = plain_mix(*exact, kept, *settings)
    found = [y, *torch.autograd.grad(y, given, out)]
    right = [expected, *torch.autograd.grad(expected, exact, out.double())]
    assert all(a.dtype == b.dtype for a, b in zip(found[1:], given))
    return [((a.double() - b).norm() / b.norm().clamp_min(1e-30)).item() for a, b in zip(found, right)]


CASES = {
    "odd": ((2, 5, 7, 8, 2), None, ()),
    "even": ((1, 8, 6, 24, 1), None, ()),
    "several images at a time": ((3, 4, 4, 8, 2), None, ()),
    "one token": ((1, 1, 1, 8, 2), None, ()),
    "one row": ((2, 1, 6, 8, 1), None, ()),
    "one column": ((1, 6, 1, 8, 1), None, ()),
    "two columns": ((1, 3, 2, 4, 1), None, ()),
    "few modes": ((1, 8, 10, 8, 2), (5, 3), ()),
    "centred": ((2, 9, 12, 8, 2), (5, 4), ("forward", True)),
    "magnitude": ((1, 6, 5, 10, 2), None, ("ortho", False, 0.05, "magnitude")),
    "no threshold": ((1, 5, 6, 8, 2), None, ("ortho", False, 0.0)),
    "no skip": ((1, 5, 6, 8, 2), None, ("ortho", False, 0.01, "parts", False)),
    "width 5": ((1, 4, 6, 5, 1), None, ()),
    "blocks of 20": ((1, 4, 6, 40, 2), None, ()),
    "tall": ((1, 18, 3, 4, 1), None, ()),
    "odd in all": ((3, 5, 1, 5, 1), None, ()),
    "wide hidden layer": ((3, 4, 4, 8, 2, 2), None, ()),
    "narrow hidden layer": ((3, 4, 4, 16, 1, 0.5), None, ("ortho", False, 0.05, "magnitude")),
    "many rows": ((3, 9, 16, 10, 2), None, ()),
}


WAYS = [(case, how) for how in ("one pass", "in steps") for case in CASES]
WAYS += [(case, "little room") for case in ("several images at a time", "wide hidden layer", "odd in all")]
WAYS += [
    (case, "two images at a time") for case in ("one row", "wide hidden layer", "narrow hidden layer", "many rows")
]


@interpreted
@pytest.mark.parametrize("case, how", WAYS)
def test_output_and_every_gradient(case, how, monkeypatch):
    sizes, modes, settings = CASES[case]
    make_plan.cache_clear()
    if how == "little room":
        monkeypatch.setattr("afno.kernels.backward.LEAST", 0)
    if how in ("in steps", "two images at a time"):
        made = Plan.__init__
        monkeypatch.setattr(Plan, "__init__", lambda self, *a: (made(self, *a), setattr(self, "fused", False))[0])
        for module in ("mix", "backward"):
            monkeypatch.setattr(f"afno.kernels.{module}.group", lambda p: 1 if how == "in steps" else min(2, p.B))
    x, weights, out = values(*sizes)
    errors = compare(x, weights, out, keep_modes(sizes[1:3], modes), *settings)
    make_plan.cache_clear()
    assert max(errors) < 1e-5, errors


@interpreted
@pytest.mark.parametrize("how", ["one pass", "in steps"])
@pytest.mark.parametrize(
    "case, F",
    [
        ("even", 2),
        ("even", 4),
        ("tall", 3),
        ("magnitude", 3),
        ("wide hidden layer", 2),
        ("no skip", 5),
        ("many rows", 3),
    ],
)
def test_divided_columns(case, F, how, monkeypatch):
    sizes, _, settings = CASES[case]
    make_plan.cache_clear()
    monkeypatch.setattr("afno.kernels.layer.division", lambda *_: (F, False))
    if how == "in steps":
        made = Plan.prepare
        monkeypatch.setattr(Plan, "prepare", lambda self: (made(self), setattr(self, "fused", False))[0])
    x, weights, out = values(*sizes)
    errors = compare(x, weights, out, keep_modes(sizes[1:3]), *settings)
    y = fused_mix(x, *[w.requires_grad_() for w in weights], keep_modes(sizes[1:3]), *settings)
    y += 1  # the result is no view
    make_plan.cache_clear()
    assert max(errors) < 1e-5, errors


@interpreted
def test_what_does_not_compile_gives_way(monkeypatch):
    from triton.runtime.errors import OutOfResources

    from afno.kernels import hopper, layer, say_once

    enter, left = layer.enter, [OutOfResources(300_000, 232_448, "shared memory")]
    monkeypatch.setattr(layer, "enter", lambda *a: _raise(left.pop()) if left else enter(*a))
    monkeypatch.setattr(hopper, "BROKEN", set())
    monkeypatch.setattr(hopper, "capable", lambda device, dtype: dtype == torch.float16)  # the tokens are float32
    say_once.cache_clear()
    x, weights, _ = values(2, 4, 6, 8, 2)
    told = Settings(4, 4, "ortho", False, 0.01, "parts", True)
    with pytest.warns(UserWarning, match="do not compile here .*shared memory"):
        y, _ = forward(x, tuple(weights), told, False)
    torch.testing.assert_close(y, plain_mix(x, *weights, keep_modes((4, 6))))
    left.append(OutOfResources(300_000, 232_448, "shared memory"))
    with pytest.raises(OutOfResources):  # the plain kernels failed as well
        forward(x, tuple(weights), told, False)
    hopper.BROKEN.clear()
    left.append(ValueError("something else"))
    with pytest.raises(ValueError, match="something else"):
        forward(x, tuple(weights), told, False)


@interpreted
def test_dropped_rows_keep_the_shape_that_was_said(monkeypatch):
    "Where kernels for Hopper failed, rows are not divided, but what is kept for the gradients is, as a compiled graph expects."
    make_plan.cache_clear()
    monkeypatch.setattr("afno.kernels.layer.division", lambda *_: (2, True))
    sizes = (2, 8, 10, 8, 2)
    x, weights, out = values(*sizes)
    errors = compare(x, weights, out, keep_modes(sizes[1:3], (5, 3)))
    told = Settings(5, 3, "ortho", False, 0.01, "parts", True)
    z = forward(x, tuple(weights), told, True)[1]
    make_plan.cache_clear()
    assert z.shape == spectrum_shape(x.shape, 3, 2) and max(errors) < 1e-5, errors


@interpreted
@pytest.mark.parametrize("F", [1, 2])
@pytest.mark.parametrize("sizes, lam", [((2, 4, 6, 8, 1), 0.05), ((2, 4, 5, 16, 2), 0.05), ((1, 8, 4, 24, 1), 0.0)])
def test_gradients_from_what_the_layers_were_given(sizes, lam, F, monkeypatch):
    "As where kernels for Hopper failed: their pass for wide blocks keeps this, products stand for it."
    from afno.kernels import hopper, layer

    make_plan.cache_clear()
    prepare, pairs = Plan.prepare, []
    monkeypatch.setattr(Plan, "prepare", lambda self: (prepare(self), setattr(self, "fused", False))[0])
    monkeypatch.setattr(layer, "division", lambda *_: (F, False))
    monkeypatch.setattr(layer.wide, "keeps", lambda c, d, height, rows, columns: pairs.append(columns) or True)
    monkeypatch.setattr(hopper, "capable", lambda device, dtype: True)
    monkeypatch.setattr(hopper, "BROKEN", {torch.device("cpu")})
    x, weights, out = values(*sizes)
    kept, settings = keep_modes(sizes[1:3]), ("ortho", False, lam)
    assert max(compare(x, weights, out, kept, *settings)) < 1e-5
    B, H, W, C, K = sizes
    assert set(pairs) == {B * F * kept.cols}
    told = (H, kept.cols, "ortho", False, lam, "parts", True)
    z = torch.ops.afno.mix(x, *weights, *told, True)[1]
    assert z.shape == (5 if lam else 4, B * kept.cols * H, C)
    given = [t.requires_grad_() for t in (x, *weights)]
    y = fused_mix(*given, kept, *settings)
    first, second = (torch.autograd.grad(y, given, out, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))  # what is kept stays as it is
    torch.library.opcheck(
        torch.ops.afno.mix.default, (*given, *told, True), test_utils=("test_schema", "test_faketensor")
    )
    make_plan.cache_clear()


@interpreted
@pytest.mark.parametrize("kind", ["parts", "magnitude"])
def test_nan_is_not_swallowed(kind):
    "Neither ReLU nor shrinkage makes a number of it."
    x, weights, _ = values(2, 4, 6, 8, 2)
    x[0, 1, 2, 3] = float("nan")
    y = fused_mix(x, *weights, keep_modes((4, 6)), "ortho", False, 0.5, kind, False)
    assert y[0, :, :, :4].isnan().all() and y[1].isfinite().all() and y[0, :, :, 4:].isfinite().all()
    weights[1].fill_(float("nan"))
    assert fused_mix(x, *weights, keep_modes((4, 6)), "ortho", False, 0.5, kind, False).isnan().all()


def _raise(error):
    raise error


@interpreted
def test_little_room_takes_several_launches(monkeypatch):
    p = Plan(torch.Size((3, 4, 4, 8)), torch.float32, torch.device("cpu"), 2, 4, (0, 1, 2, 3), 3, "ortho", False, True)
    assert len(_steps(p, 0.0)[2]) == 1
    monkeypatch.setattr("afno.kernels.backward.LEAST", 0)
    assert len(_steps(p, 0.5)[2]) == 3


def test_images_are_taken_a_few_at_a_time(monkeypatch):
    p = Plan(torch.Size((5, 4, 4, 8)), torch.float32, torch.device("cpu"), 2, 4, (0, 1, 2, 3), 3, "ortho", False, False)
    assert not p.fused and group(p) == 5 and [n for _, n, *_ in _groups(p, 0.0)[3]] == [5]
    monkeypatch.setattr("afno.kernels.mix.GROUP_BYTES", 2.2 * p.K * p.M * p.R * 4 * p.cp)
    assert group(p) == 2 and [(first, n) for first, n, *_ in _groups(p, 0.5)[3]] == [(0, 2), (2, 2), (4, 1)]


@interpreted
def test_hidden_layer_may_be_wider():
    x, weights, out = values(1, 4, 5, 8, 2, expansion=3)
    assert max(compare(x, weights, out, keep_modes((4, 5)))) < 1e-5


@interpreted
def test_tokens_need_not_be_contiguous():
    x, weights, _ = values(2, 6, 4, 8, 2)
    kept, turned = keep_modes((4, 6)), x.transpose(1, 2)
    for view in (turned, x.flip(3).transpose(1, 2), x.permute(0, 3, 1, 2).contiguous().permute(0, 3, 2, 1)):
        torch.testing.assert_close(
            fused_mix(view, *weights, kept),
            fused_mix(view.contiguous(), *weights, kept),
            rtol=0,
            atol=0,
        )


@interpreted
def test_without_gradients_the_answer_is_the_same():
    x, weights, _ = values(1, 5, 6, 8, 2)
    kept = keep_modes((5, 6))
    with torch.no_grad():
        alone = fused_mix(x, *weights, kept)
    assert torch.equal(alone, fused_mix(x.requires_grad_(), *weights, kept).detach())


@interpreted
def test_frozen_weights_and_checkpoints():
    from torch.utils.checkpoint import checkpoint

    x, weights, out = values(1, 5, 6, 8, 2)
    kept = keep_modes((5, 6))
    x.requires_grad_()

    def layer(x):
        return fused_mix(x, *weights, kept)

    (plain,), (again,) = (
        torch.autograd.grad(f(x), x, out) for f in (layer, lambda x: checkpoint(layer, x, use_reentrant=False))
    )
    assert torch.equal(plain, again)


@interpreted
def test_data_parallel_gives_the_same_gradients(tmp_path):
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    class Layer(torch.nn.Module):
        def __init__(self, weights):
            super().__init__()
            self.weights = torch.nn.ParameterList(weights)

        def forward(self, x):
            return fused_mix(x, *self.weights, keep_modes((5, 6)))

    x, weights, out = values(1, 5, 6, 8, 2)
    layer = Layer(weights)
    layer(x).backward(out)
    alone = [w.grad.clone() for w in layer.weights]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(layer)
        parallel.zero_grad()
        parallel(x).backward(out)
    finally:
        dist.destroy_process_group()
    assert all(torch.equal(w.grad, g) for w, g in zip(layer.weights, alone))


@interpreted
def test_compiles_whole_forward_and_backward():
    x, weights, out = values(1, 5, 6, 8, 2)
    given, kept = [t.requires_grad_() for t in (x, *weights)], keep_modes((5, 6))
    compiled = torch.compile(fused_mix, fullgraph=True, backend="aot_eager")
    plain, again = (torch.autograd.grad(f(*given, kept), given, out) for f in (fused_mix, compiled))
    assert all(torch.equal(a, b) for a, b in zip(plain, again))


@interpreted
@pytest.mark.parametrize("grad", [False, True], ids=["without gradients", "with gradients"])
def test_operator_passes_pytorchs_checks(grad):
    x, weights, _ = values(1, 3, 4, 8, 2)
    given = [t.requires_grad_(grad) for t in (x, *weights)]
    told = (3, 3, "ortho", False, 0.01, "parts", True)
    torch.library.opcheck(torch.ops.afno.mix.default, (*given, *told, grad))
    if grad:
        y, z = torch.ops.afno.mix(*[t.detach() for t in given], *told, True)
        args = (y, z, *weights, *told)
        torch.library.opcheck(torch.ops.afno.mix_backward.default, args, test_utils=("test_schema", "test_faketensor"))


@interpreted
def test_second_derivative_is_refused():
    x, weights, _ = values(1, 3, 4, 8, 2)
    x.requires_grad_()
    (g,) = torch.autograd.grad(fused_mix(x, *weights, keep_modes((3, 4))).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="route='matmul'"):
        g.sum().backward()


def test_unlike_rows_and_places_are_refused():
    x, weights, _ = values(1, 5, 4, 8, 2)
    for rows in ((0, 1, 2), (0, 2), (1,), (0, 3, 4), (1, 2, 3, 4)):  # (0, 1, 4) and (0, 4) would be right
        with pytest.raises(ValueError, match="keep_modes"):
            fused_mix(x, *weights, Modes(rows, 3))
    if INTERPRET:
        with pytest.raises(ValueError, match="weights on"):
            told = Settings(5, 3, "ortho", False, 0.01, "parts", True)
            forward(x, (*weights[:3], weights[3].to("meta")), told, False)


@interpreted
def test_every_call_looks_at_its_own_tensors():
    "Shapes, strides, addresses and types in turn, as no call may get what was prepared for another."
    gen = torch.Generator().manual_seed(1)
    _, weights, _ = values(1, 2, 4, 4, 1)
    shifted = torch.randn(2 * 2 * 4 * 4 + 1, generator=gen)[1:].view(2, 2, 4, 4)  # 4 bytes beside an aligned address
    sparse, other = shifted[..., None].repeat(1, 1, 1, 1, 2)[..., 0], torch.randn(1, 4, 2, 4, generator=gen)
    calls = [shifted.clone(), shifted, shifted.transpose(1, 2), other, shifted[:, :, ::2], sparse]
    calls += [shifted.half()]  # the interpreter has no products of bfloat16
    for x in (*calls, *calls[:3]):
        x, kept = x.detach().requires_grad_(), keep_modes((x.shape[1], x.shape[2]))
        y, right = fused_mix(x, *weights, kept), plain_mix(x.double(), *[w.double() for w in weights], kept)
        found, expected = (torch.autograd.grad(t.double().square().sum(), x)[0] for t in (y, right))
        limit = 1e-5 if x.dtype == torch.float32 else 0.05
        for a, b in ((y, right), (found, expected)):
            assert ((a - b).norm() / b.norm()).item() < limit, (x.shape, x.stride(), x.dtype)


class Recorder:
    "Stands for a kernel and for what it is compiled to."

    arg_names = ["X", "Y", "n", "BLOCK"]

    def __init__(self):
        self.compiled, self.run = [], []

    def __getitem__(self, grid):
        def compile_(*args, **constants):
            self.compiled.append((grid, args, constants))
            run = lambda *args: self.run.append((args[:9], args[9:]))  # noqa: E731
            return SimpleNamespace(run=run, function="f", packed_metadata="m")

        return compile_


def test_launch_is_compiled_once_for_every_type_and_device(monkeypatch):
    monkeypatch.setattr("afno.kernels.transforms.INTERPRET", False)
    monkeypatch.setattr("afno.kernels.transforms._stream", lambda index: 0)
    kernel, x = Recorder(), torch.zeros(64)
    launch = Launch(kernel, 5, 7, BLOCK=16, num_warps=4)
    odd = x[1:]
    launch(odd, x)  # not aligned to 16 bytes: by Triton, which compiles for it; not kept
    launch(x, x)
    assert kernel.compiled[0] == ((5, 1, 1), (odd, x, 7), {"BLOCK": 16, "num_warps": 4}) and len(kernel.compiled) == 2
    launch(x[4:], x)
    assert kernel.run == [((5, 1, 1, 0, "f", "m", None, None, None), (x.data_ptr() + 16, x.data_ptr(), 7, 16))]
    launch(x, odd)
    assert len(kernel.compiled) == 3 and len(kernel.run) == 1
    launch(x.half(), x)
    launch(x.half(), x)
    launch(x, x)
    assert len(kernel.compiled) == 4 and len(kernel.run) == 3


def test_launch_takes_fewer_stages_where_shared_memory_is_small(monkeypatch):
    from triton.runtime import errors

    monkeypatch.setattr("afno.kernels.transforms.INTERPRET", False)

    class Small(Recorder):
        def __getitem__(self, grid):
            def compile_(*args, num_stages, **constants):
                if num_stages > most:
                    raise errors.OutOfResources(114_688, 101_376, "shared memory")
                return Recorder.__getitem__(self, grid)(*args, num_stages=num_stages, **constants)

            return compile_

    most, kernel, x = 1, Small(), torch.zeros(64)
    Launch(kernel, 5, 7, BLOCK=16, num_stages=3)(x, x)
    assert kernel.compiled == [((5, 1, 1), (x, x, 7), {"BLOCK": 16, "num_stages": 1})]
    most = 0
    with pytest.raises(errors.OutOfResources):
        Launch(kernel, 5, 7, BLOCK=16, num_stages=3)(x, x)


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from afno.kernels.backward import back_kernel
from afno.kernels.mix import Plan, columns_in, columns_out, mix_kernel

def shared(kernel, known, options):
    kinds = {n: "constexpr" if n in known else "fp32" if n == "lam" else "*fp32" if n in ("P", "B1", "B2") else
             "*bf16" if n in "A A2 X Y E V Z G W1 W2 SZ SH SE SU".split() else "i32" for n in kernel.arg_names}
    at = kernel.arg_names.index
    aligned = {(at(n),): [["tt.divisibility", 16]] for n, k in kinds.items() if k[0] == "*"}
    source = ASTSource(kernel, kinds, {(at(n),): v for n, v in known.items()}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 86, 32), options=options).metadata.shared

plan = lambda H, K, c: Plan(torch.Size((2, H, 8, K * c)), torch.bfloat16, torch.device("cpu"), K, c, tuple(range(H)), 5, "ortho", False, True)
for kernel in (mix_kernel, back_kernel):
    p = plan(128, 2, 96)
    print(shared(kernel, p.known | {"SHRINKS": True}, p.config))
p = plan(256, 1, 208)
for launch in (columns_in(p, 2), columns_in(p, 2, "mask", 0.01), columns_in(p, 2, "flags"), columns_out(p, 2, 0.01)):
    stages = {n: launch.constants[n] for n in ("num_warps", "num_stages")}
    known = {n: v for n, v in launch.constants.items() if n not in stages}
    print(min(shared(launch.kernel, known, stages | {"num_stages": s}) for s in range(1, stages["num_stages"] + 1)))
"""


def test_plain_kernels_fit_into_less_shared_memory():
    "GPUs of compute capability 8.6 and 8.9 have 99 KiB; the launches take fewer stages there."
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr[-2000:]
    found = [int(line) for line in run.stdout.split()]
    assert len(found) == 6 and max(found) <= 101376, found


def test_pieces_and_packed_rows():
    assert pieces(90) == (64, 32) and pieces(56) == (64,) and pieces(1) == (16,)
    for width in range(1, 12):
        assert packed(width, width // 2 + 1) == width


def test_half_precision_on_a_gpu_that_is_not_served_says_why_once(monkeypatch):
    from afno import kernels

    tokens = SimpleNamespace(is_cuda=True, numel=lambda: 8, dtype=torch.float16, shape=(1, 1, 1, 512), device="cuda:0")
    kernels.say_once.cache_clear()
    with pytest.warns(UserWarning, match="route='auto': no room; the other routes answer"):
        assert not kernels.is_chosen("auto", tokens, lambda x: "no room")
    monkeypatch.setattr(kernels, "refusal", lambda x: None)
    with pytest.warns(UserWarning, match="up to 128 channels, these have 256; PyTorch's attention"):
        assert "256" in kernels.windows_refusal(tokens, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not kernels.is_chosen("auto", tokens, lambda x: "no room") and kernels.windows_refusal(tokens, 2)
        tokens.dtype = torch.float32  # which they are not made for
        assert not kernels.is_chosen("auto", tokens, lambda x: "float32") and kernels.windows_refusal(tokens, 1)
    kernels.say_once.cache_clear()


def test_what_is_not_served_says_why():
    x = torch.zeros(1, 3, 4, 8)
    assert "need a GPU" in refusal(x) and "on meta" in refusal(x.to("meta"))
    if GPU:
        assert "2^31" in refusal(x[:1, :1, :1, :1].cuda().bfloat16().expand(1, 2048, 2048, 768))
    if GPU:
        assert "float32" in refusal(x.cuda()) and "no tokens" in refusal(x[:0].cuda())
        assert refusal(x.cuda().bfloat16()) is None


@on_gpu
@pytest.mark.slow
@pytest.mark.cuda
def test_mixer_takes_the_kernels_under_autocast_and_gives_its_type_back():
    settings = {"num_blocks": 4, "sparsity_threshold": 0.0, "skip": "none"}
    layer, x = AFNO2D(96, **settings).cuda(), torch.randn(2, 14, 14, 96).cuda()
    exact = AFNO2D(96, **settings, route="fft").cuda().double()
    exact.load_state_dict(layer.state_dict())
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.float32
    expected = exact(x.double())
    assert ((y - expected).norm() / expected.norm()).item() < 1.5e-2


@on_gpu
@pytest.mark.slow
@pytest.mark.cuda
@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(
    "sizes, modes",
    [
        ((2, 56, 56, 768, 8), None),
        ((2, 56, 56, 384, 16), None),
        ((3, 90, 180, 768, 8), None),
        ((1, 256, 256, 208, 1), None),
        ((3, 56, 56, 750, 1), None),
        ((2, 13, 29, 440, 5), (7, 5)),
        ((1, 1, 1, 768, 8), None),
        ((2, 256, 256, 192, 2), None),
        ((2, 256, 40, 192, 2), 0.25),
        ((1, 252, 30, 192, 2), (21, 7)),
        ((2, 100, 24, 192, 2), 0.4),
        ((2, 130, 60, 416, 1), None),
        ((1, 512, 60, 192, 2), None),
        ((1, 512, 300, 192, 2), 0.3),
        ((1, 320, 320, 192, 2), None),
        ((1, 256, 512, 208, 1), None),
        ((1, 720, 1440, 96, 1), None),
        ((2, 256, 256, 96, 4), None),
        ((2, 97, 60, 192, 2), None),
        ((2, 256, 64, 90, 1), None),
        ((2, 145, 145, 192, 2), 0.25),
        ((1, 130, 300, 192, 2), 0.25),
        ((2, 128, 64, 75, 1), None),
    ],
    ids=str,
)
def test_half_precision_on_a_gpu(sizes, modes, dtype, limit):
    "Biases keep pre-activations off ReLU's kink, where any rounding flips gradients."
    x, weights, out = values(*sizes, scale=0.02, device="cuda", dtype=dtype)
    weights[1] += torch.where(torch.rand_like(weights[1]) > 0.5, 2.0, -2.0)
    errors = compare(x, weights, out, keep_modes(sizes[1:3], modes), "ortho", False, 0.0, "parts", False)
    assert max(errors) <= limit, errors


@on_gpu
@pytest.mark.slow
@pytest.mark.cuda
@pytest.mark.parametrize("sizes", [(2, 56, 56, 768, 8), (2, 64, 64, 208, 1)], ids=str)
def test_graph_replays_the_same_bytes(sizes):
    x, weights, out = values(*sizes, scale=0.02, device="cuda", dtype=torch.bfloat16)
    given, kept = [t.requires_grad_() for t in (x, *weights)], keep_modes(sizes[1:3])

    def run():
        y = fused_mix(*given, kept)
        return y, *torch.autograd.grad(y, given, out)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles
        expected = run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(expected, found))


@on_gpu
@pytest.mark.slow
@pytest.mark.cuda
def test_same_bytes_every_run_and_compiled():
    x, weights, out = values(9, 56, 56, 768, 8, scale=0.02, device="cuda", dtype=torch.bfloat16)
    given, kept = [t.requires_grad_() for t in (x, *weights)], keep_modes((56, 56))

    def run(f):
        y = f(*given, kept)
        return y, *torch.autograd.grad(y, given, out)

    first = run(fused_mix)
    for other in (run(fused_mix), run(torch.compile(fused_mix, fullgraph=True))):
        assert all(torch.equal(a, b) for a, b in zip(first, other))
