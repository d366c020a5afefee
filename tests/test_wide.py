"""The pass for wide blocks: compiled for Hopper wherever there is Triton, compared with the steps where there is such a GPU."""

import pytest
import torch
from hopper_compiler import check_compiled

from afno.kernels import hopper, wide
from afno.kernels.divide import divided
from afno.kernels.mix import Plan, inputs_of, keep_in_steps, mix_spectrum, real_weights
from afno.spectral import row_indices

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@pytest.mark.parametrize(
    "tile",
    [
        (208, 208, 4, 3, 16, True),
        (200, 200, 4, 3, 16, False),
        (480, 160, 2, 2, 32, True),
        (272, 136, 1, 2, 16, True),
        (256, 256, 1, 4, 0, False),
        (208, 208, 4, 3, 16, True, True),
        (208, 208, 4, 3, 16, False, True),
        (480, 160, 2, 2, 32, True, True),
        (256, 256, 1, 4, 0, True, True),
    ],
    ids=str,
)
def test_compiles_for_hopper(tile):
    "Not a register may be spilled: kernels that did gave wrong results."
    check_compiled("wide", ("wide_kernel",), ("Wide", tile), warps=8, floats="", bytes_="SU", spills=0)


def plan(B, H, W, C, K, rows=0, cols=0, centred=False, parts=True, hidden=0, F=1, dtype=torch.bfloat16, device="cpu"):
    given = torch.Size((B, H, W, C)), dtype, torch.device(device, 0) if device == "cuda" else torch.device(device)
    kept = row_indices(H, rows or H), cols or (W + 1) // 2 if centred else cols or W // 2 + 1
    p = Plan(*given, K, hidden or C // K, *kept, "ortho", centred, parts)
    return divided(p, F) if F > 1 else p


def test_which_calls_it_serves():
    def tile(*sizes, **settings):
        return wide.wide_of(plan(*sizes, **settings))

    assert wide.serves(plan(2, 64, 64, 208, 1)) is None  # no GPU
    assert tile(2, 256, 256, 208, 1, F=4) == (208, 208, 4, 3, 16, False, False)
    for c, chunks in (
        (104, (2, 0)),
        (136, (2, 16)),
        (144, (2, 16)),
        (160, (2, 32)),
        (168, (3, 0)),
        (216, (4, 0)),
        (256, (4, 0)),
    ):
        assert tile(1, 50, 9, 3 * c, 3, rows=31)[3:5] == chunks, c
    for other in ((1, 50, 9, 96, 1), (1, 50, 9, 264, 1), (1, 50, 9, 100, 1), (1, 32, 9, 208, 1), (1, 90, 9, 208, 1)):
        assert tile(*other) is None, other
    assert tile(1, 50, 9, 208, 1, parts=False) is None and tile(1, 50, 9, 208, 1, hidden=104) is None
    assert tile(2, 256, 9, 208, 1, rows=129, F=4) is None  # parts keep different rows
    for size, full in (
        ((2, 33, 9, 208, 1), True),
        ((2, 36, 9, 136, 1), True),
        ((2, 35, 9, 136, 1), False),
        ((2, 49, 9, 104, 1), True),
        ((2, 48, 9, 104, 1), False),
    ):
        assert wide.pays(plan(*size), wide.wide_of(plan(*size))) == full, size
    for size, full in (
        ((208, 208, 64, 64, 516), True),
        ((256, 256, 64, 64, 2), True),
        ((136, 136, 64, 64, 2), False),
        ((208, 208, 63, 63, 2), False),
        ((208, 208, 64, 63, 2), False),
        ((208, 208, 64, 64, 3), False),
        ((208, 104, 64, 64, 2), False),
        ((96, 96, 64, 64, 2), False),
    ):
        assert wide.keeps(*size) == full, size


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
    dict(B=2, H=64, W=30, C=144, K=1), dict(B=3, H=64, W=33, C=200, K=1), dict(B=2, H=52, W=33, C=432, K=2),
    dict(B=9, H=64, W=64, C=136, K=1), dict(B=9, H=64, W=64, C=152, K=1, threshold=0.0),
    dict(B=1, H=64, W=1, C=208, K=1), dict(B=1, H=40, W=2, C=1560, K=15), dict(B=5, H=64, W=30, C=208, K=1, spoil=True),
]  # fmt: skip


KEPT = [
    dict(B=2, H=256, W=256, C=208, K=1, F=4), dict(B=2, H=64, W=33, C=208, K=1, threshold=0.0),
    dict(B=1, H=128, W=30, C=480, K=3, F=2), dict(B=4, H=64, W=9, C=256, K=1, dtype=torch.float16),
    dict(B=3, H=64, W=30, C=288, K=2, centred=True, cols=14), dict(B=1, H=64, W=6, C=192, K=1),
]  # fmt: skip


@pytest.mark.cuda
@pytest.mark.skipif(not ON_HOPPER, reason="needs an H100 or H200")
@pytest.mark.parametrize("case", KEPT, ids=str)
def test_keeps_what_the_steps_keep(case):
    "Spectra and what either layer is given by their norms; of the shrinkage's flags all but those that rounding decides."
    B, H, W, C, K, F, lam = (
        case.get(n, d) for n, d in zip(("B", "H", "W", "C", "K", "F", "threshold"), (0,) * 5 + (1, 0.01))
    )
    torch.manual_seed(0)
    more = {n: v for n, v in case.items() if n in ("dtype", "centred", "cols")}
    p, c = plan(B, H, W, C, K, F=F, device="cuda", **more), C // K
    p.wide = wide.wide_of(p)
    assert wide.keeps(c, c, p.H, p.R, p.B * p.M)
    shapes = (2, K, c, c), (2, K, c), (2, K, c, c), (2, K, c)
    w = real_weights(p, *(torch.randn(*s, device="cuda") / (c**0.5 if len(s) == 4 else 1) for s in shapes))
    z = torch.randn(p.B, p.Q, p.H, p.P, device="cuda").to(p.dtype)
    room = [z.new_full((5 if lam else 4, p.B * p.M * p.R, C), 7) for _ in range(2)]
    found = wide.mix_and_keep(p, z, torch.zeros_like(z), w, lam, room[0])
    plain = keep_in_steps(p, z, torch.zeros_like(z), w, lam, room[1])
    assert torch.equal(found, wide.mix_spectrum(p, z, torch.zeros_like(z), w, lam))
    (s, h, flags), (s2, h2, flags2) = (inputs_of(p, kept) for kept in room)
    for a, b in ((found, plain), (s, s2), (h, h2)):
        assert (a.float() - b.float()).norm() < (2e-3 if p.dtype == torch.float16 else 1e-2) * b.float().norm()
    if lam:
        assert set(flags.unique().tolist()) == {0, 1} and (flags != flags2).float().mean() < 2e-3


@pytest.mark.cuda
@pytest.mark.skipif(not ON_HOPPER, reason="needs an H100 or H200")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_as_the_steps(case):
    assert compare(**case) < (2e-3 if case.get("dtype") == torch.float16 else 1e-2)
