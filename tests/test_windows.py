"""Long-short attention by kernels against its plain way in float64: in Triton's interpreter at tiny sizes, on a GPU at real ones."""

import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

GPU = torch.cuda.is_available()  # else conftest.py chose the interpreter
pytest.importorskip("triton")

from afno.kernels import half, windows_op, windows_refusal  # noqa: E402
from afno.kernels.transforms import INTERPRET  # noqa: E402
from afno.mixers import LongShortAttention  # noqa: E402
from afno.mixers.longshort import is_plain, margin, mix_windows, tile, untile, visible_keys  # noqa: E402

interpreted = pytest.mark.skipif(not INTERPRET, reason="kernels are compiled for the GPU here")
on_gpu = pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")


def values(B, H, W, heads, D, R, device="cpu", dtype=torch.float32, seed=0):
    "Draw queries, keys and values (slices of one tensor), landmarks and a gradient."
    g, C = torch.Generator().manual_seed(seed), heads * D
    qkv, far, out = (torch.randn(*n, generator=g) for n in ((B, H, W, 3 * C), (2, B, R, C), (B, H, W, C)))
    return [t.to(device, dtype) for t in (*qkv.to(device, dtype).chunk(3, -1), *far)], out.to(device, dtype)


def plain_windows(q, k, v, far_k, far_v, heads, w):
    "Attend from copies of grown tiles."
    (_, H, W, C), r = q.shape, far_k.shape[1]

    def apart(z):  # (B, T, n, C) -> (B, T, heads, n, C/heads)
        return z.unflatten(-1, (heads, -1)).transpose(2, 3)

    def keys(far, z):
        near = tile(z, w, margin(w))
        return apart(torch.cat([far[:, None].expand(-1, near.shape[1], -1, -1), near], 2))

    seen = F.pad(visible_keys((H, W), w, q.device), (r, 0), value=True)[None, :, None, None]
    scores = apart(tile(q, w)) @ keys(far_k, k).mT / math.sqrt(C // heads)
    y = scores.masked_fill(~seen, -math.inf).softmax(-1) @ keys(far_v, v)
    return untile(y.transpose(2, 3).flatten(3), w, (H, W))


def compare(given, out, heads, window):
    "Relative errors of the output and of the five gradients, against the plain way in float64."
    given = [t.detach().requires_grad_() for t in given]
    y, logs = windows_op(*given, heads, window)
    assert y.dtype == given[0].dtype and y.shape == out.shape and logs.dtype == torch.float32
    found = [y, *torch.autograd.grad(y, given, out)]
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(found[1:], given))
    exact = [t.detach().double().requires_grad_() for t in given]
    expected = plain_windows(*exact, heads, window)
    right = [expected, *torch.autograd.grad(expected, exact, out.double())]
    return [((a.double() - b).norm() / b.norm().clamp_min(1e-30)).item() for a, b in zip(found, right)]


CASES = {  # (B, H, W, heads, channels of a head, landmarks), window
    "whole tiles": ((1, 8, 12, 2, 16, 8), 4),
    "cut tiles": ((2, 9, 10, 2, 4, 8), 4),
    "several patches": ((1, 18, 21, 1, 4, 2), 4),
    "window 1": ((1, 9, 10, 1, 5, 1), 1),
    "window 2": ((2, 5, 19, 2, 4, 3), 2),
    "window 3": ((1, 13, 11, 1, 26, 8), 3),
    "window 5": ((1, 6, 12, 1, 4, 2), 5),
    "window 7": ((1, 15, 9, 1, 4, 1), 7),
    "window 8": ((1, 17, 9, 1, 4, 2), 8),
    "a tile of several programs": ((1, 10, 12, 1, 4, 2), 9),
    "one row": ((2, 1, 11, 2, 4, 2), 4),
    "one column": ((1, 11, 1, 1, 4, 2), 3),
    "one token": ((2, 1, 1, 2, 4, 1), 4),
    "smaller than a tile": ((1, 3, 2, 2, 5, 1), 7),
    "many landmarks": ((1, 5, 6, 1, 4, 70), 4),
}


@interpreted
@pytest.mark.parametrize("case", CASES)
def test_output_and_every_gradient(case):
    sizes, window = CASES[case]
    errors = compare(*values(*sizes), sizes[3], window)
    assert max(errors) < 1e-6, errors


@interpreted
@pytest.mark.parametrize("case", ["cut tiles", "window 3"])
def test_float16(case):  # the interpreter has no products of bfloat16
    sizes, window = CASES[case]
    errors = compare(*values(*sizes, dtype=torch.float16), sizes[3], window)
    assert max(errors) < 2e-3, errors


@interpreted
def test_queries_keys_and_values_may_lie_anyhow():
    (q, k, v, *far), out = values(2, 6, 9, 2, 4, 3)
    views = (q.transpose(1, 2).contiguous().transpose(1, 2), k.mT.contiguous().mT, v.repeat(2, 1, 1, 1)[::2], *far)
    assert all(a.stride() != b.stride() for a, b in zip(views[:3], (q, k, v)))
    assert max(compare(views, out.mT.contiguous().mT, 2, 4)) < 1e-6
    assert max(compare([t.contiguous() for t in (q, k, v, *far)], out, 2, 4)) < 1e-6


@interpreted
def test_far_scores_do_not_overflow():
    given, out = values(1, 5, 6, 1, 4, 2)
    given[0] *= 300  # scores of hundreds: shares of one key, the others' underflow
    errors = compare(given, out, 1, 4)
    assert max(errors[:1] + errors[3:4]) < 1e-4, errors


@interpreted
@pytest.mark.parametrize("grad", [False, True], ids=["without gradients", "with gradients"])
def test_operators_pass_pytorchs_checks(grad):
    (q, k, v, *far), out = values(1, 3, 5, 2, 4, 2)
    given = [t.contiguous().requires_grad_(grad) for t in (q, k, v, *far)]
    torch.library.opcheck(torch.ops.afno.windows.default, (*given, 2, 4))
    if grad:
        given = [t.detach() for t in given]
        args = (out, *given, *windows_op(*given, 2, 4), 2, 4)
        torch.library.opcheck(
            torch.ops.afno.windows_backward.default, args, test_utils=("test_schema", "test_faketensor")
        )


@interpreted
def test_second_derivative_is_refused():
    given, _ = values(1, 3, 4, 1, 4, 1)
    q = given[0].clone().requires_grad_()
    (g,) = torch.autograd.grad(windows_op(q, *given[1:], 1, 4)[0].square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="float32"):
        g.sum().backward()


def mixer_and_gradients(layer, way, x):
    "Output, the input's gradient and the parameters'."
    x = x.detach().clone().requires_grad_()
    y = way(layer, x)
    names, ps = zip(*[(n, p) for n, p in layer.named_parameters() if n not in layer.zero_gradient])
    return [y, *torch.autograd.grad(y.float().square().sum(), [x, *ps])]


def plain(layer, x):
    return layer(x)


@interpreted
@pytest.mark.parametrize("bias", [True, False], ids=["with a bias", "without"])
@pytest.mark.parametrize("grid", [(1, 1), (5, 7), (8, 8), (4, 9)], ids=str)
def test_the_mixer_by_kernels_is_the_mixer(grid, bias):
    torch.manual_seed(0)
    layer, x = LongShortAttention(12, num_heads=3, rank=2, qkv_bias=bias), torch.randn(3, *grid, 12)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    exact = layer.double()
    right = mixer_and_gradients(exact, plain, x.double())
    for a, b in zip(mixer_and_gradients(layer.float(), mix_windows, x), right):
        assert a.shape == b.shape and ((a - b).norm() <= 2e-5 * b.norm() + 1e-6).item()


@interpreted
def test_the_mixer_compiles_whole_on_any_grid():
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    layer = LongShortAttention(8, num_heads=2, rank=2)
    compiled = torch.compile(mix_windows, fullgraph=True, backend="aot_eager")
    for grid in ((5, 6), (4, 4), (7, 3)):
        x = torch.randn(2, *grid, 8)
        first = mixer_and_gradients(layer, mix_windows, x)
        ways = (compiled, lambda m, x: checkpoint(mix_windows, m, x, use_reentrant=False))
        for again in (mixer_and_gradients(layer, way, x) for way in ways):
            for a, b in zip(first, again):
                torch.testing.assert_close(a, b)


def test_hooks_and_replaced_maps_are_honoured():
    "The kernels read the weights of some maps without calling them; whoever hooks, prunes or replaces them gets the plain way."
    from torch.nn.utils import parametrizations, prune

    def layer():
        return LongShortAttention(8, num_heads=2, rank=2)

    assert is_plain(layer())
    changes = (
        lambda m: m.qkv.register_forward_hook(lambda *_: None),
        lambda m: m.dual_ln_full.register_full_backward_hook(lambda *_: None),
        lambda m: prune.random_unstructured(m.qkv, "weight", 0.5),
        lambda m: parametrizations.weight_norm(m.qkv),
        lambda m: setattr(m, "dual_ln_dp", torch.nn.Identity()),
    )
    for change in changes:
        change(changed := layer())
        assert not is_plain(changed)


@interpreted
def test_tensors_that_do_not_fit_are_refused():
    (q, k, v, *far), _ = values(1, 3, 4, 2, 4, 1)
    for given, heads, what in (
        ((q, k[:, :2], v, *far), 2, "allowed are"),
        ((q, k, v, *far), 3, "divisible by the heads"),
        ((q, k, v, far[0], far[1].double()), 2, "cast or move"),
    ):
        with pytest.raises(ValueError, match=what):
            windows_op(*given, heads, 4)


COMPILE = """
import re, subprocess, sys, tempfile, triton
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from afno.kernels.windows import LOG2E, forward_kernel, keys_kernel, patch_of, queries_kernel

arch, known = int(sys.argv[1]), {"LOG2E": LOG2E, "G": patch_of(12, 64, 8, 4, 8)}
for kernel in (forward_kernel, queries_kernel, keys_kernel):
    wide = {"L": "*fp32", "PART": "*fp32", "PAIRS": "*i64" if kernel is keys_kernel else "*fp32"}
    kinds = {n: "constexpr" if n in known else wide.get(n, "*bf16" if n.isupper() and n not in "HW" else "i32")
             for n in kernel.arg_names}
    at = kernel.arg_names.index
    aligned = {(at(n),): [["tt.divisibility", 16]] for n, k in kinds.items() if k[0] == "*"}
    source = ASTSource(kernel, kinds, {(at(n),): v for n, v in known.items()}, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4, "num_stages": 2})
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "k.ptx").write_text(made.asm["ptx"])
        given = [tools / "ptxas", "-v", f"--gpu-name=sm_{arch}{'a' if arch == 90 else ''}", "k.ptx", "-o", "k"]
        said = subprocess.run(given, cwd=folder, capture_output=True, text=True)
    print(kernel.__name__, made.metadata.shared, re.search(r"(\\d+) bytes spill stores", said.stdout + said.stderr)[1])
"""


@pytest.mark.parametrize("arch", [80, 90])
def test_compiles(arch):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", COMPILE, str(arch)], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr[-2000:]
    found = [line.split() for line in run.stdout.splitlines()]
    assert len(found) == 3
    for name, shared, spilled in found:
        assert int(shared) <= 101376 and int(spilled) == 0, (
            f"{name}: {shared} bytes of shared memory, {spilled} spilled"
        )


def test_what_is_not_served():
    x = torch.zeros(1, 3, 4, 300)
    assert half(x) is x and "need a GPU" in windows_refusal(x, 3) and "up to 128 channels" in windows_refusal(x, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert half(x) is x
    if GPU:
        with torch.autocast("cuda", torch.float16):
            assert half(x.cuda()).dtype == torch.float16 and half(x.cuda().double()).dtype == torch.float64
        assert windows_refusal(x.cuda().half(), 3) is None and "float32" in windows_refusal(x.cuda(), 3)


REAL = [
    ((4, 56, 56, 12, 64, 8), 4),
    ((2, 90, 180, 12, 26, 8), 4),
    ((1, 256, 256, 4, 52, 8), 4),
    ((1, 61, 67, 3, 128, 16), 4),
    ((3, 14, 14, 8, 40, 8), 7),
    ((2, 33, 40, 4, 64, 1), 1),
    ((2, 33, 40, 4, 32, 70), 2),
    ((1, 50, 50, 6, 64, 4), 16),
    ((300, 4, 4, 12, 64, 8), 4),
]


@on_gpu
@pytest.mark.slow
@pytest.mark.cuda
@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("sizes, window", REAL, ids=str)
def test_half_precision_on_a_gpu(sizes, window, dtype, limit):
    errors = compare(*values(*sizes, device="cuda", dtype=dtype), sizes[3], window)
    assert max(errors) <= limit, errors


@on_gpu
@pytest.mark.slow
@pytest.mark.cuda
@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("how", ["autocast", "half weights", "compiled"])
def test_the_mixer_takes_the_kernels(how, dtype, limit, monkeypatch):
    "Errors against float64, of the output, the input's gradient and the parameters', are those of the plain way."
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer, x = LongShortAttention(768).cuda(), torch.randn(2, 56, 56, 768, device="cuda")
    exact = LongShortAttention(768).cuda().double()
    exact.load_state_dict(layer.state_dict())
    right, calls = mixer_and_gradients(exact, plain, x.double()), []
    if how == "half weights":
        layer, x = layer.to(dtype), x.to(dtype)

    def errors(layer):
        with torch.autocast("cuda", dtype, enabled=how != "half weights"):
            found = mixer_and_gradients(layer, plain, x)
        assert found[0].dtype == x.dtype
        return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, right)]

    with monkeypatch.context() as patch:
        patch.setattr("afno.mixers.longshort.windows_refusal", lambda *_: "compared with")
        before = errors(layer)
    if how == "compiled":
        layer.compile(fullgraph=True)
    else:
        monkeypatch.setattr("afno.mixers.longshort.mix_windows", lambda *a: calls.append(1) or mix_windows(*a))
    after = errors(layer)
    assert calls or how == "compiled"
    assert after[0] <= limit and all(a <= 1.5 * b + limit for a, b in zip(after, before)), (before, after)


@on_gpu
@pytest.mark.slow
@pytest.mark.cuda
def test_same_bytes_every_run_and_little_memory():
    torch.manual_seed(0)
    layer, x = LongShortAttention(768).cuda().bfloat16(), torch.randn(1, 256, 256, 768, device="cuda").bfloat16()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        layer(x)
    assert (
        torch.cuda.max_memory_allocated() - before < 8 * x.numel() * 2
    )  # q, k, v, y, the result, and the landmarks' shares
    first, again = (mixer_and_gradients(layer, plain, x) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again))
