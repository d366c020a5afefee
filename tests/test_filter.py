"""GFN's fused filter against the plain route in float64: in Triton's interpreter at tiny sizes, on a GPU at real ones."""

import os
import subprocess
import sys
import warnings

import pytest
import torch

GPU = torch.cuda.is_available()  # else conftest.py chose the interpreter
pytest.importorskip("triton")

from afno.kernels import (  # noqa: E402
    column_parts,
    filter_refusal,
    fused_filter,
    hopper,
    say_once,
)
from afno.kernels import filter as kernels  # noqa: E402
from afno.kernels.transforms import INTERPRET  # noqa: E402
from afno.mixers import GlobalFilter  # noqa: E402
from afno.spectral import irfft2, rfft2  # noqa: E402

interpreted = pytest.mark.skipif(not INTERPRET, reason="kernels are compiled for the GPU here")
on_gpu = pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")


def values(shape, dtype=torch.float32, filter_dtype=torch.float32, device="cpu"):
    "Draw tokens, a filter and a gradient."
    gen, (_, H, W, C) = torch.Generator().manual_seed(0), shape
    x, f, g = (torch.randn(*size, generator=gen).to(device) for size in (shape, (H, W // 2 + 1, C, 2), shape))
    return x.to(dtype), f.to(filter_dtype), g.to(dtype)


def plain_filter(x, f):
    "Filter by matrix products, one equation a line."
    z, (re, im) = rfft2(x, route="matmul"), f.unbind(-1)
    z = torch.stack([z[:, 0] * re - z[:, 1] * im, z[:, 0] * im + z[:, 1] * re], 1)
    return irfft2(z, (x.shape[1], x.shape[2]), route="matmul")


def compare(x, f, g):
    "Relative errors of the output and of both gradients."
    given = [t.detach().requires_grad_() for t in (x, f)]
    y = fused_filter(*given)
    assert y.dtype == x.dtype and y.shape == x.shape
    exact = [t.detach().double().requires_grad_() for t in given]
    expected = plain_filter(*exact)
    found = [y, *torch.autograd.grad(y, given, g)]
    right = [expected, *torch.autograd.grad(expected, exact, g.double())]
    assert all(a.dtype == b.dtype for a, b in zip(found[1:], given))
    return [((a.double() - b).norm() / b.norm().clamp_min(1e-30)).item() for a, b in zip(found, right)]


CASES = {
    "odd": (2, 5, 7, 8),
    "even": (1, 8, 6, 24),
    "one token": (1, 1, 1, 8),
    "one row": (3, 1, 6, 8),
    "one column": (2, 6, 1, 8),
    "two columns": (1, 3, 2, 5),
    "several images a tile": (7, 5, 4, 12),
    "several images in turn": (5, 9, 6, 5),
    "tall": (2, 18, 3, 20),
    "taller than a small tile": (1, 33, 4, 8),
}


@interpreted
@pytest.mark.parametrize("case", CASES)
def test_output_and_both_gradients(case):
    errors = compare(*values(CASES[case]))
    assert max(errors) < 1e-6, errors


@interpreted
@pytest.mark.parametrize("filter_dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_type_of_the_filter(filter_dtype):
    limit = {torch.float16: 1e-3, torch.bfloat16: 5e-3, torch.float64: 1e-6}[filter_dtype]  # its gradient is rounded
    x, f, g = values((3, 6, 5, 12), filter_dtype=filter_dtype)
    *exact, rounded = compare(x, f, g)
    assert max(exact) < 1e-6 and rounded < limit


@interpreted
def test_half_precision():
    assert max(compare(*values((3, 9, 7, 12), torch.float16))) < 2e-3  # the interpreter has no products of bfloat16


@interpreted
@pytest.mark.parametrize("shape, F", [("even", 2), ("even", 4), ("tall", 2), ("tall", 3), ("one column", 3)])
def test_divided_columns(shape, F, monkeypatch):
    monkeypatch.setattr("afno.kernels.filter.parts_of", lambda *_: F)
    errors = compare(*values(CASES[shape]))
    assert max(errors) < 1e-6, errors


@interpreted
@pytest.mark.parametrize("F", [1, 3])
def test_several_groups_of_images_are_summed(F, monkeypatch):
    made = kernels.tile_of
    monkeypatch.setattr("afno.kernels.filter.parts_of", lambda *_: F)
    monkeypatch.setattr(
        "afno.kernels.filter.tile_of",
        lambda *a: made(*a)._replace(each=2 * made(*a).G, groups=-(-7 // 2 // made(*a).G)),
    )
    kernels._launch.cache_clear()
    kernels.call_of.cache_clear()
    errors = compare(*values((7, 9, 4, 20)))
    kernels._launch.cache_clear()
    assert max(errors) < 1e-6, errors


@interpreted
def test_tokens_and_filter_need_not_be_contiguous():
    x, f, _ = values((2, 6, 6, 8))
    right = fused_filter(x, f)
    for view in (
        x.transpose(1, 2).contiguous().transpose(1, 2),
        x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
    ):
        assert torch.equal(fused_filter(view, f), right)
    assert torch.equal(fused_filter(x, f.transpose(2, 3).contiguous().transpose(2, 3)), right)
    assert torch.equal(fused_filter(x, f.requires_grad_()).detach(), right)  # what is kept does not change the answer


@interpreted
def test_compiles_whole_and_passes_pytorchs_checks():
    x, f, g = values((2, 5, 6, 8))
    given = [x.requires_grad_(), f.requires_grad_()]
    compiled = torch.compile(fused_filter, fullgraph=True, backend="aot_eager")
    plain, again = (torch.autograd.grad(run(*given), given, g) for run in (fused_filter, compiled))
    assert all(torch.equal(a, b) for a, b in zip(plain, again))
    torch.library.opcheck(torch.ops.afno.filter.default, (*given, True))
    torch.library.opcheck(torch.ops.afno.filter.default, (x.detach(), f.detach(), False))
    y, z = torch.ops.afno.filter(x.detach(), f.detach(), True)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.afno.filter_backward.default, (y, z, f.detach()), test_utils=tests)


@interpreted
@pytest.mark.parametrize("grid", [(5, 6), (7, 9)], ids=["own grid", "another grid"])
def test_mixer_hands_its_filter_to_the_kernels(grid, monkeypatch):
    torch.manual_seed(0)
    layer, x = GlobalFilter(8, (5, 6)), torch.randn(2, *grid, 8, requires_grad=True)
    given, g = (x, layer.complex_weight), torch.randn(2, *grid, 8)
    plain = layer(x)
    monkeypatch.setattr("afno.mixers.gfn.is_chosen", lambda *_: True)
    fused = layer(x)
    for a, b in zip((fused, *torch.autograd.grad(fused, given, g)), (plain, *torch.autograd.grad(plain, given, g))):
        torch.testing.assert_close(a, b)


@interpreted
def test_what_does_not_compile_gives_way(monkeypatch):
    from triton.runtime.errors import OutOfResources

    enter, left = kernels.enter, [OutOfResources(300_000, 232_448, "shared memory")]

    def fails_once(*given):
        if left:
            raise left.pop()
        return enter(*given)

    monkeypatch.setattr(kernels, "enter", fails_once)
    monkeypatch.setattr(hopper, "BROKEN", set())
    monkeypatch.setattr(hopper, "capable", lambda device, dtype: dtype == torch.float16)  # the tokens are float32
    say_once.cache_clear()
    x, f, _ = values((2, 4, 6, 8))
    with pytest.warns(UserWarning, match="do not compile here .*shared memory"):
        torch.testing.assert_close(fused_filter(x, f), plain_filter(x, f))


@interpreted
def test_a_filter_that_does_not_compile_leaves_the_rows_alone(monkeypatch):
    from triton.runtime.errors import OutOfResources

    def fails(*_):
        raise OutOfResources(300_000, 232_448, "shared memory")

    _, matrix, shape = kernels._launch(
        kernels._call(torch.Size((2, 4, 6, 8)), torch.float32, torch.device("cpu")).outer, 1, False
    )
    monkeypatch.setattr(kernels, "_launch", lambda *_: (fails, matrix, shape))
    monkeypatch.setattr(hopper, "BROKEN", set())
    monkeypatch.setattr(hopper, "capable", lambda device, dtype: dtype == torch.float16)
    with pytest.raises(OutOfResources):
        fused_filter(*values((2, 4, 6, 8))[:2])
    assert not hopper.BROKEN


@interpreted
def test_nan_is_not_swallowed():
    x, f, _ = values((2, 9, 4, 8))  # too tall to share a tile of 16 rows
    x[0, 1, 2, 3] = float("nan")
    y = fused_filter(x, f)
    assert y[0, :, :, 3].isnan().all() and y[1].isfinite().all() and y[0, :, :, :3].isfinite().all()


@interpreted
def test_second_derivative_and_unlike_shapes_are_refused():
    x, f, _ = values((1, 3, 4, 8))
    x.requires_grad_()
    (g,) = torch.autograd.grad(fused_filter(x, f).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="route='matmul'"):
        g.sum().backward()
    with pytest.raises(ValueError, match="does not fit"):
        fused_filter(x, f[:, :2])
    with pytest.raises(ValueError, match="no parts short enough"):
        fused_filter(torch.zeros(1, 67, 4, 8), torch.zeros(67, 3, 8, 2))


def test_parts_of_columns():
    "On Hopper its row transforms divide by 2 or 4 for nothing; elsewhere tiles have at most 64 rows."
    for H in range(1, 1025):
        for W, on_hopper in ((64, True), (300, True), (64, False)):
            F, most = column_parts(H, W, on_hopper), 128 if on_hopper else 64
            fits = [n for n in range(1, 17) if H % n == 0 and H <= most * n]
            assert (F in fits) if fits else F == 0
            assert F == 1 or H > 64
    assert [column_parts(H, 64, True) for H in (56, 64, 90, 97, 256)] == [1, 1, 2, 1, 4]
    assert [column_parts(H, 300, True) for H in (90, 256, 720)] == [1, 4, 12] and column_parts(90, 64, False) == 2


def test_tiles():
    assert kernels.tile_of(84, 56, 768, 29, False, True, 132) == (64, 64, 1, 21, 4)
    assert kernels.tile_of(84, 56, 768, 29, True, False, 132)[:3] == (64, 32, 1)
    assert kernels.tile_of(64, 14, 192, 8, True, True, 132) == (64, 64, 4, 8, 8)
    assert kernels.tile_of(2, 97, 96, 40, True, True, 132)[:3] == (128, 32, 1)
    for images in range(1, 40):  # every image is in one group
        for H in (1, 7, 20, 64):
            t = kernels.tile_of(images, H, 24, 5, True, True, 132)
            assert t.each % t.G == 0 and t.each * (t.groups - 1) < images <= t.each * t.groups


@pytest.mark.skipif(GPU, reason="kernels serve here")
def test_mixer_asked_for_kernels_says_once_why_others_answer():
    say_once.cache_clear()
    torch.manual_seed(0)
    layer, x = GlobalFilter(8, (5, 6), route="triton"), torch.randn(2, 5, 6, 8)
    plain = GlobalFilter(8, (5, 6))
    plain.load_state_dict(layer.state_dict())
    with pytest.warns(UserWarning, match="route='triton': the fused kernels need a GPU"):
        y = layer(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(layer(x), y) and torch.equal(plain(x), y)
    assert "need a GPU" in filter_refusal(x)
    with pytest.raises(ValueError, match="allowed are auto, fft, matmul, triton"):
        GlobalFilter(8, route="cuda")


COMPILE = """
import re, subprocess, sys, tempfile, triton
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from afno.kernels.filter import filter_back_kernel, filter_kernel

kernel, arch = globals()[sys.argv[1]], int(sys.argv[2])
known = dict(HB=int(sys.argv[3]), BC=int(sys.argv[4]), G=1, NS=2)
names = kernel.arg_names
kinds = {n: "constexpr" if n in known else "*fp32" if n in "TE" else "*bf16" if n in "ZYA" else "i32" for n in names}
aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if kinds[n][0] == "*"}
source = ASTSource(kernel, kinds, {(names.index(n),): v for n, v in known.items()}, aligned)
made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 8, "num_stages": 2})
tools = Path(triton.__file__).parent / "backends/nvidia/bin"
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "k.ptx").write_text(made.asm["ptx"])
    given = [tools / "ptxas", "-v", f"--gpu-name=sm_{arch}{'a' if arch == 90 else ''}", "k.ptx", "-o", "k"]
    said = subprocess.run(given, cwd=folder, capture_output=True, text=True)
print(made.metadata.shared, re.search(r"(\\d+) bytes spill stores", said.stdout + said.stderr)[1])
"""


@pytest.mark.parametrize(
    "kernel, arch, HB, BC, most",
    [
        ("filter_kernel", 90, 64, 64, 116000),  # two programs a multiprocessor
        ("filter_kernel", 90, 128, 32, 232448),
        ("filter_back_kernel", 90, 64, 64, 232448),
        ("filter_back_kernel", 90, 128, 32, 232448),
        ("filter_kernel", 86, 64, 64, 101376),
        ("filter_back_kernel", 86, 64, 32, 101376),
    ],
)
def test_compiles(kernel, arch, HB, BC, most):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, kernel, str(arch), str(HB), str(BC)]
    run = subprocess.run(command, capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr[-2000:]
    shared, spilled = map(int, run.stdout.split())
    assert shared <= most, f"{kernel} needs {shared} bytes of shared memory, there are {most}"
    assert spilled <= (320 if HB > 64 else 64), f"{kernel} spills {spilled} bytes of registers"


REAL = [(4, 56, 56, 768), (2, 90, 180, 208), (4, 256, 256, 96), (64, 14, 14, 192), (2, 97, 60, 75), (1, 512, 300, 40)]
REAL += [(9, 1, 64, 768), (3, 13, 1, 24), (2, 128, 260, 96), (1, 1024, 32, 64), (5, 120, 48, 12)]


@on_gpu
@pytest.mark.slow
@pytest.mark.cuda
@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("shape", REAL, ids=str)
def test_half_precision_on_a_gpu(shape, dtype, limit):
    if filter_refusal(values(shape, dtype, device="cuda")[0]):
        pytest.skip("this GPU's tiles are too small for columns of so many rows")
    errors = compare(*values(shape, dtype, device="cuda"))
    assert max(errors) <= limit, errors


@on_gpu
@pytest.mark.slow
@pytest.mark.cuda
def test_same_bytes_every_run_and_compiled():
    x, f, g = values((20, 56, 56, 768), torch.bfloat16, device="cuda")
    given = [x.requires_grad_(), f.requires_grad_()]

    def run(function):
        y = function(*given)
        return y, *torch.autograd.grad(y, given, g)

    first = run(fused_filter)
    for other in (run(fused_filter), run(torch.compile(fused_filter, fullgraph=True))):
        assert all(torch.equal(a, b) for a, b in zip(first, other))


@on_gpu
@pytest.mark.slow
@pytest.mark.cuda
@pytest.mark.parametrize("grid", [(14, 14), (20, 26)], ids=["own grid", "another grid"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_mixer_under_autocast(grid, compiled):
    torch.manual_seed(0)
    layer, x = GlobalFilter(96).cuda(), torch.randn(2, *grid, 96).cuda().requires_grad_()
    exact = GlobalFilter(96, route="fft").cuda().double()
    exact.load_state_dict(layer.state_dict())
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    with torch.autocast("cuda", torch.bfloat16):
        y = run(x)
    right = exact(x.double())
    assert y.dtype == torch.float32
    g = torch.randn_like(y)
    found = [y, *torch.autograd.grad(y, (x, layer.complex_weight), g)]
    expected = [right, *torch.autograd.grad(right, (x, exact.complex_weight), g.double())]
    for a, b in zip(found, expected):
        assert ((a - b).norm() / b.norm()).item() < 1.5e-2
