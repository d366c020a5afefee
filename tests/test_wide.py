"""The pass for wide blocks: compiled for Hopper wherever there is Triton, compared with the steps where there is such a GPU."""

import os
import subprocess
import sys

import pytest
import torch

from afno.kernels import hopper, wide
from afno.kernels.divide import divided
from afno.kernels.mix import Plan, mix_spectrum, real_weights
from afno.spectral import row_indices

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9

COMPILE = """
import re, subprocess, sys, tempfile, triton
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from afno.kernels.wide import Wide, wide_kernel

names = wide_kernel.arg_names
kinds = {n: "constexpr" if n == "G" else "fp32" if n == "lam" else "*bf16" if n in "Z Y A W1 B1 W2 B2".split() else "i32" for n in names}
aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if kinds[n][0] == "*"}
source = GluonASTSource(wide_kernel, kinds, {(names.index("G"),): Wide(*eval(sys.argv[1]))}, aligned)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
tools = Path(triton.__file__).parent / "backends/nvidia/bin"
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "k.ptx").write_text(made.asm["ptx"])
    said = subprocess.run([tools / "ptxas", "-v", "--gpu-name=sm_90a", "k.ptx", "-o", "k"], cwd=folder, capture_output=True, text=True)
said = said.stdout + said.stderr
print(made.metadata.shared, re.search(r"(\\d+) bytes spill stores", said)[1], "serialized" in said)
"""


@pytest.mark.parametrize("tile", [(208, 208, 4, 4, True), (480, 160, 2, 3, True), (256, 128, 1, 2, False)], ids=str)
def test_compiles_for_hopper(tile):
    pytest.importorskip("triton")
    if hopper.gluon is None:
        pytest.skip("this Triton has no Gluon")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", COMPILE, repr(tile)], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr[-2000:]
    shared, spilled, serialized = run.stdout.split()
    assert int(shared) <= 232448, f"{shared} bytes of shared memory, a multiprocessor has 232,448"
    assert int(spilled) == 0, f"{spilled} bytes of registers spilled: kernels that did gave wrong results"
    assert serialized == "False", "the assembler puts its products one after another"


def plan(B, H, W, C, K, rows=0, cols=0, centred=False, parts=True, hidden=0, F=1, dtype=torch.bfloat16, device="cpu"):
    given = torch.Size((B, H, W, C)), dtype, torch.device(device, 0) if device == "cuda" else torch.device(device)
    kept = row_indices(H, rows or H), cols or (W + 1) // 2 if centred else cols or W // 2 + 1
    p = Plan(*given, K, hidden or C // K, *kept, "ortho", centred, parts)
    return divided(p, F) if F > 1 else p


def test_which_calls_it_serves():
    def tile(*sizes, **settings):
        return wide.wide_of(plan(*sizes, **settings))

    assert wide.serves(plan(2, 64, 64, 208, 1)) is None  # no GPU
    assert tile(2, 256, 256, 208, 1, F=4) == (208, 208, 4, 4, False) and tile(1, 50, 9, 480, 3, rows=31).N == 3
    for other in ((1, 50, 9, 96, 1), (1, 50, 9, 264, 1), (1, 50, 9, 100, 1), (1, 32, 9, 208, 1), (1, 90, 9, 208, 1)):
        assert tile(*other) is None, other
    assert tile(1, 50, 9, 208, 1, parts=False) is None and tile(1, 50, 9, 208, 1, hidden=104) is None
    assert tile(2, 256, 9, 208, 1, rows=129, F=4) is None  # parts keep different rows
    for size, full in (
        ((2, 64, 9, 208, 1), True),
        ((2, 33, 9, 208, 1), False),
        ((2, 64, 9, 136, 1), True),
        ((2, 60, 9, 136, 1), False),
    ):
        assert wide.pays(plan(*size), wide.wide_of(plan(*size))) == full, size


def compare(B, H, W, C, K, threshold=0.01, F=1, dtype=torch.bfloat16, spoil=False, **settings):
    "Give the largest relative difference of the steps and this, over the mixed spectra of all images that are finite."
    torch.manual_seed(0)
    p = plan(B, H, W, C, K, F=F, dtype=dtype, device="cuda", **settings)
    assert hopper.able(p.device, p.dtype)
    p.wide, c = wide.wide_of(p), C // K
    assert p.wide
    shapes = (2, K, c, c), (2, K, c), (2, K, c, c), (2, K, c)
    w = real_weights(p, *(torch.randn(*s, device="cuda") / (c**0.5 if len(s) == 4 else 1) for s in shapes))
    z = torch.randn(p.B, p.Q, p.H, p.P, device="cuda").to(dtype)
    if spoil:
        z[1, 0, 0, 0] = float("nan")
    found, plain = (mix(p, z, torch.zeros_like(z), w, threshold) for mix in (wide.mix_spectrum, mix_spectrum))
    again = wide.mix_spectrum(p, z, torch.zeros_like(z), w, threshold)
    assert torch.equal(found.nan_to_num(7), again.nan_to_num(7))
    assert torch.equal(wide.mix_spectrum(p, z, z.clone(), w, threshold).nan_to_num(7), again.nan_to_num(7))  # in place
    if spoil:
        assert found[1, 0].isnan().any() and found[1, 1:].isfinite().all()
        found, plain = (t[torch.arange(p.B) != 1] for t in (found, plain))
    return ((found.float() - plain.float()).norm() / plain.float().norm()).item()


CASES = [
    dict(B=2, H=256, W=256, C=208, K=1, F=4), dict(B=3, H=50, W=31, C=208, K=1, threshold=0.1),
    dict(B=2, H=64, W=64, C=256, K=2, threshold=0.0), dict(B=1, H=112, W=20, C=312, K=3, F=2),
    dict(B=5, H=64, W=30, C=320, K=2), dict(B=2, H=33, W=17, C=136, K=1, dtype=torch.float16),
    dict(B=3, H=60, W=40, C=192, K=1, rows=31, cols=9), dict(B=2, H=48, W=21, C=256, K=1, centred=True),
    dict(B=1, H=64, W=1, C=208, K=1), dict(B=1, H=40, W=2, C=1560, K=15), dict(B=5, H=64, W=30, C=208, K=1, spoil=True),
]  # fmt: skip


@pytest.mark.cuda
@pytest.mark.skipif(not ON_HOPPER, reason="needs an H100 or H200")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_as_the_steps(case):
    assert compare(**case) < (2e-3 if case.get("dtype") == torch.float16 else 1e-2)
