"""The kernels for Hopper: compiled for it wherever there is Triton, compared with the plain kernels where there is one."""

import types

import pytest
import torch
from gluon_on_torch import rows_on_torch
from hopper_compiler import check_compiled

from afno.kernels import hopper
from afno.kernels import rows as hopper_rows
from afno.kernels import transforms as plain
from afno.kernels.backward import mix_gradients
from afno.kernels.divide import divide, divided, twiddles, unite
from afno.kernels.mix import Plan, mix_spectrum, real_weights
from afno.kernels.rows import factors, is_split, rows_in, rows_out, slot_matrices
from afno.spectral import row_indices

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@pytest.mark.parametrize(
    "tile",
    [
        (768, 96, 96, 0, 64, 1, 1, 1, 3, 3, 4, True),
        (192, 48, 96, 2, 64, 4, 1, 1, 2, 3, 4, True),
        (96, 96, 96, 2, 128, 1, 2, 2, 3, 3, 8, True),
        (1, 64, 64, 1, 1, True, True, (16, 16), False),
        (2, 32, 64, 3, 3, True, True, (16, 16), True),
        (4, 16, 128, 2, 2, True, False, (2, 1), False),
        (1, 32, 128, 2, 2, True, True, (16, 16), False, 2),
        (2, 32, 64, 3, 3, False, True, (16, 16), True, 1, True),
        (2, 32, 64, 2, 2, True, True, (16, 16), False, 1, True),
        (1, 32, 128, 2, 2, True, True, (16, 16), False, 2, True),
    ],
    ids=lambda t: ("tiles" if len(t) > 11 else "rows") + str(t).replace(" ", ""),
)
def test_compiles_for_hopper(tile):
    if len(tile) > 11:
        check_compiled("hopper", ("mix_kernel", "back_kernel"), ("Tile", tile), warps=hopper.Tile(*tile).NW)
    else:
        check_compiled("rows", ("in_kernel", "out_kernel"), ("Rows", tile))


@pytest.mark.parametrize("F", [1, 2, 4])
@pytest.mark.parametrize("all_, beyond", [(True, 2), (False, 2), (False, 1), (False, 0)])
def test_even_and_odd_tiles_compile_for_hopper(F, all_, beyond):
    "Three programs share the registers of a multiprocessor, two with the skip or going in divided by 4."
    for kernel, add in (("in_halves_kernel", False), ("out_halves_kernel", False), ("out_halves_kernel", True)):
        two = add or (kernel[0] == "i" and F == 4)
        tile = ("Rows", (F, 64 // F, 64, 2, 2, all_, add, (16, 16), False, 1, False, beyond))
        check_compiled("rows", (kernel,), tile, spills=0, registers=255 if two else 168)


def test_tiles():
    def plan(H, C, K, hidden=0, centred=False, parts=True):
        size, cpu = torch.Size((2, H, 8, C)), torch.device("cpu")
        return Plan(size, torch.float16, cpu, K, hidden or C // K, row_indices(H, H), 5, "ortho", centred, parts)

    def tile(*sizes, **settings):
        return hopper.tile_of(plan(*sizes, **settings))

    assert hopper.serves(plan(56, 768, 8)) is None  # no GPU
    assert (tile(56, 768, 8).P, tile(56, 768, 8).N, tile(56, 768, 8).NW) == (64, 1, 4)
    assert (tile(14, 768, 8).N, tile(16, 768, 8).N, tile(30, 768, 8).N, tile(90, 768, 8).P) == (4, 4, 2, 128)
    assert [tile(h, 768, 8).mode for h in (56, 64, 63)] == [0, 2, 0] and tile(64, 768, 8, centred=True).mode == 1
    assert tile(56, 384, 16) is None and tile(56, 750, 1) is None and tile(129, 768, 8) is None
    assert tile(56, 768, 8, parts=False) is None


@pytest.mark.parametrize(
    "H, R, F", [(256, 256, 2), (256, 129, 2), (252, 21, 4), (180, 90, 4), (145, 73, 5), (130, 65, 5), (145, 145, 5)]
)
def test_parts_of_a_column_keep_its_rows(H, R, F):
    size, cpu = torch.Size((2, H, 8, 96)), torch.device("cpu")
    p = divided(Plan(size, torch.float16, cpu, 1, 96, row_indices(H, R), 5, "ortho", False, True), F)
    found = sorted(f + F * r for f, rows in enumerate(p.kept) for r in rows)
    assert found == sorted(row_indices(H, R)) and p.R == max(map(len, p.kept)) and p.B == 2 * F
    t = hopper.tile_of(p)
    assert (
        t.F == F
        and t.A == (F if R < H else 1)
        and (t.N == 1 or t.A == 1)
        and hopper.pair_matrix(p, t).shape == (t.A, t.P, t.P)
    )


@pytest.mark.parametrize(
    "W, cols", [(7, 4), (10, 6), (66, 34), (66, 20), (1, 1), (2, 2), (192, 97), (254, 60), (250, 100)]
)
@pytest.mark.parametrize("F", [1, 2])
def test_row_matrices_in_the_order_of_the_kernels(W, cols, F):
    "Tensor cores multiply by them as they stand: 8 real parts, 8 imaginary parts."
    p = Plan(torch.Size((1, 2, W, 8)), torch.float64, torch.device("cpu"), 1, 8, (0, 1), cols, "ortho", False, True)
    into, back = slot_matrices(p, F)[:2]
    x, (slots, lone) = torch.randn(W, dtype=torch.float64), hopper_rows.slots_of(p.Q, F, hopper_rows.piece(W))
    y = (into[:, :W] @ x).view(-1, 2, 8)
    re, im = y[:, 0].flatten()[:slots], y[:, 1].flatten()[:slots]
    right = torch.fft.rfft(x, norm="ortho")[:cols]
    assert torch.allclose(re, right.real[:slots]) and torch.allclose(im[1:], right.imag[1:slots])
    pole = 2 * (cols - 1) == W
    assert slots == cols - lone and lone == (pole and (F == 1 or W % 64 == 0))
    assert not lone or torch.allclose(im[:1], right.real[-1:])
    if cols == W // 2 + 1:
        given = torch.zeros(back.shape[1] // 16, 2, 8, dtype=torch.float64)
        for m in range(slots):
            given[m // 8, :, m % 8] = torch.view_as_real(right)[m] * torch.tensor([1.0, m > 0])
        if lone:
            given[-1 if F > 1 else 0, 0 if F > 1 else 1, 0] = right.real[-1]
        assert torch.allclose((back @ given.flatten())[:W], x)


@pytest.mark.parametrize("W", [260, 320, 512])
def test_even_and_odd_tokens_make_the_whole_row(W):
    "What the kernels do with the spectra of half rows, in the order of their threads, against the dense matrices."
    p = Plan(torch.Size((1, 1, W, 8)), torch.float64, torch.device("cpu"), 1, 8, (0,), W // 2 + 1, "ortho", False, True)
    assert is_split(p) and not is_split(
        Plan(torch.Size((1, 1, W, 8)), torch.float64, p.device, 1, 8, (0,), 9, "ortho", False, True)
    )
    w, n, half = torch.view_as_complex(factors(p, 1).double())[: W // 4], W // 4, 0.5**0.5
    place = torch.arange(n) // 8 * 16 + torch.arange(n) % 8  # of real parts
    low, high = 2 * torch.arange(n) - 1, W - 1 - 2 * torch.arange(n)  # of columns m and W/2 - m
    exact = (p.forward, p.inverse, p.inverse_t, p.forward_t)
    z, x = torch.randn(W, dtype=torch.float64), torch.randn(W, dtype=torch.float64)
    for i, A in enumerate(slot_matrices(p, 1)):
        if i % 2 == 0:
            sums = A[:, : W // 2] @ x.view(-1, 2)
            even, odd = torch.complex(sums[place], sums[place + 8]).T
            a, b = even * half + odd * w, (even * half - odd * w).conj()
            y = torch.zeros(W, dtype=torch.float64)
            y[low[1:]], y[low[1:] + 1], y[high[1:]], y[high[1:] + 1] = a.real[1:], a.imag[1:], b.real[1:], b.imag[1:]
            y[0], y[W - 1], y[W // 2 - 1], y[W // 2] = a.real[0], b.real[0], even.imag[0], -odd.imag[0]
            right = exact[i][:W, :W] @ x
        else:
            at = torch.cat([torch.tensor([0]), low[1:]]), torch.cat([torch.tensor([W - 1]), high[1:]])
            a, b = (torch.complex(z[t], z[(t + 1) % W]) for t in at)
            even, odd = (a + b.conj()) * half, (a - b.conj()) * w.conj()
            even[0], odd[0] = torch.complex(even.real[0], z[W // 2 - 1]), torch.complex(odd.real[0], -z[W // 2])
            sums = torch.zeros(A.shape[1], 2, dtype=torch.float64)
            sums[place], sums[place + 8] = torch.stack([even, odd], 1).real, torch.stack([even, odd], 1).imag
            y, right = (A @ sums)[: W // 2].flatten(), exact[i][:W, :W] @ z
        assert torch.allclose(y, right, atol=1e-6), i


@pytest.fixture
def one_thread():
    "Small sums take longer on several."
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def kept_columns(W):
    "Few columns, those about W/4 and W/2, and all."
    return sorted({1, 9, 33, W // 4 - 1, W // 4, W // 4 + 1, W // 4 + 2, 65, 3 * W // 8, W // 2, W // 2 + 1})


@pytest.mark.parametrize("F", [1, 2, 4])
@pytest.mark.parametrize(
    "W, M",
    [(W, M) for W in (196, 200, 256) for M in kept_columns(W)]
    + [
        (180, 91),
        (180, 45),
        (128, 65),
        (128, 64),
        (56, 29),
        (90, 46),
        (35, 18),
        (2, 2),
        (250, 126),
        (250, 70),
        (192, 97),
        (260, 131),
        (388, 195),
    ],
)
def test_kernels_make_divided_spectra(W, M, F, monkeypatch, one_thread):
    "The kernels, run by torch, against the matrices: in, back, and the transposes of both."
    if W > 256 and F > 1:
        pytest.skip("never divided on the way")
    rows, h, C = rows_on_torch(), 2, 72 if F == 1 else 64 // F + (6 if M % 2 else 8)  # copies of 4 bytes, or of 16
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: types.SimpleNamespace(multi_processor_count=1))
    p = Plan(torch.Size((2, F * h, W, C)), torch.float64, torch.device("cpu"), 1, C, (0,), M, "ortho", False, True)
    assert rows.is_apart(p) == (192 < W <= 256 and W % 4 == 0) and rows.is_split(p) == (W > 256)
    turn = torch.view_as_complex(twiddles(p, F).double()).view(F, F, h) if F > 1 else torch.ones(1, 1, h) + 0j
    numbers = [i for i in range(2 * M) if i not in (1, W + 1)]  # columns 0 and W/2 are real
    x = torch.randn(2, F * h, W, C, dtype=torch.float64)
    e = torch.randn(2, W, F * h, C, dtype=torch.float64).transpose(1, 2)  # the skip is a view
    z = torch.randn(2, F, h, C, M, 2, dtype=torch.float64)

    def stored(z):
        "Spectra (2, F, h, C, M, 2) as they lie in memory, channels padded."
        z = z.flatten(-2)[..., numbers if F == 1 else slice(None)].permute(0, 1, 4, 2, 3).flatten(0, 1)
        return torch.nn.functional.pad(z, (0, p.P - C)).contiguous()

    given = torch.view_as_real(
        torch.einsum("fsj,bfjcm->bsjcm", turn.conj().to(torch.complex128), torch.view_as_complex(z))
    )
    packed = given.flatten(-2)[..., numbers]
    matrices = rows.slot_matrices(p, F), (p.forward, p.inverse, p.inverse_t, p.forward_t)
    for i, (A, exact) in enumerate(zip(*matrices)):
        if i % 2 == 0:
            right = torch.zeros(2, F, h, C, 2 * M, dtype=torch.float64)
            right[..., numbers] = torch.einsum("qw,bsjwc->bsjcq", exact[: p.Q, :W], x.view(2, F, h, W, C))
            right = torch.einsum(
                "fsj,bsjcm->bfjcm", turn.to(torch.complex128), torch.view_as_complex(right.unflatten(-1, (M, 2)))
            )
            found = rows.rows_in(p, F, A, x)[..., :C]
            assert torch.allclose(found, stored(torch.view_as_real(right))[..., :C], atol=1e-5), i
        else:
            right = torch.einsum("wq,bsjcq->bsjwc", exact[:W, : p.Q], packed).reshape(x.shape)
            for add in (None, e):
                found = rows.rows_out(p, F, A, stored(z), torch.empty_like(x), add)
                assert torch.allclose(found, right + (0 if add is None else add), atol=1e-5), (i, add is None)


@pytest.mark.cuda
@pytest.mark.skipif(not ON_HOPPER, reason="needs an H100 or H200")
@pytest.mark.parametrize("F", [1, 2, 4])
@pytest.mark.parametrize(
    "W, C, M",
    [
        (W, C, W // 2 + 1)
        for W, C in (
            (256, 208),
            (200, 440),
            (180, 96),
            (250, 96),
            (196, 206),
            (128, 96),
            (56, 96),
            (90, 104),
            (112, 206),
        )
    ]
    + [(W, C, M) for W, C in ((256, 208), (200, 440), (196, 206)) for M in kept_columns(W)[:-1]],
)
def test_rows_are_those_of_plain_kernels(W, C, M, F):
    if C % 8 and F == 1:
        pytest.skip("plain kernels serve")
    torch.manual_seed(0)
    size, device = torch.Size((2, 12 * F, W, C)), torch.device("cuda", 0)
    p = Plan(size, torch.bfloat16, device, 1, C, (0,), M, "ortho", False, True)
    x, e = (torch.randn(size, device=device).bfloat16() for _ in range(2))
    A, y, right = slot_matrices(p, F), torch.empty_like(x), torch.empty_like(x)
    z, packed = rows_in(p, F, A[0], x), plain.rows_in(p.forward, x, p.Q)
    wanted = divide(p, F, packed) if F > 1 else packed
    assert (z - wanted)[..., :C].float().norm() < 6e-3 * wanted[..., :C].float().norm()
    packed = unite(p, F, wanted, torch.empty_like(packed)) if F > 1 else packed
    for add in (None, e):
        rows_out(p, F, A[1], wanted, y, add)
        plain.rows_out(p.inverse, packed, right, add)
        assert (y - right).float().norm() < 8e-3 * right.float().norm()


def compare(B, H, W, C, K, rows=0, cols=0, centred=False, threshold=0.01, hidden=0, dtype=torch.bfloat16):
    "Give the largest relative difference of plain kernels and these, over the mixed spectrum and all gradients."
    torch.manual_seed(0)
    rows, cols, c, d = rows or H, cols or W // 2 + 1, C // K, hidden or C // K
    given = (torch.Size((B, H, W, C)), dtype, torch.device("cuda", 0), K, d)
    p, q = (Plan(*given, row_indices(H, rows), cols, "ortho", centred, True) for _ in range(2))
    p.tile = hopper.serves(p)
    assert p.tile
    w1, w2, b2 = (0.02 * torch.randn(*s) for s in ((2, K, c, d), (2, K, d, c), (2, K, c)))
    b1 = 4.0 * torch.randint(0, 2, (2, K, d)) - 2  # keeps ReLU's kink away, where rounding would decide
    weights = tuple(w.cuda() for w in (w1, b1, w2, b2))
    z, g = (torch.randn(B, p.Q, H, p.P, device="cuda").to(dtype) for _ in range(2))
    room, gz = torch.empty(B, H, W, C, device="cuda", dtype=dtype), g.clone()
    w, v = real_weights(p, *weights), real_weights(q, *weights)
    found = [hopper.mix_spectrum(p, z, torch.zeros_like(z), w, threshold)]
    own = g.clone()
    found += [own, *hopper.mix_gradients(p, z, own, w, threshold, weights, room)]
    plain = [mix_spectrum(q, z, torch.zeros_like(z), v, threshold)]
    plain += [gz, *mix_gradients(q, z, gz, v, threshold, weights, room)]
    return max(((a.float() - b.float()).norm() / a.float().norm().clamp_min(1e-9)).item() for a, b in zip(plain, found))


CASES = [
    dict(B=2, H=56, W=56, C=768, K=8), dict(B=9, H=56, W=56, C=768, K=8), dict(B=3, H=90, W=180, C=192, K=2),
    dict(B=3, H=33, W=47, C=192, K=3, centred=True), dict(B=3, H=64, W=64, C=180, K=2, threshold=0.0),
    dict(B=3, H=31, W=40, C=192, K=3, threshold=0.0, dtype=torch.float16), dict(B=1, H=128, W=20, C=96, K=1),
    dict(B=2, H=90, W=18, C=192, K=2, rows=45, cols=4), dict(B=2, H=30, W=34, C=192, K=4, hidden=96),
    dict(B=5, H=14, W=14, C=768, K=8), dict(B=3, H=16, W=16, C=192, K=2), dict(B=3, H=15, W=9, C=192, K=2, centred=True),
    dict(B=3, H=5, W=3, C=192, K=2), dict(B=1, H=1, W=1, C=96, K=1), dict(B=7, H=28, W=28, C=384, K=8, rows=9, cols=7),
]  # fmt: skip


@pytest.mark.cuda
@pytest.mark.skipif(not ON_HOPPER, reason="needs an H100 or H200")
@pytest.mark.parametrize("case", CASES)
def test_same_as_plain_kernels(case):
    assert compare(**case) < 5e-3  # biases sum rounded numbers here, float32 there
