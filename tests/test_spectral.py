"The transforms against each other and against NumPy, where the notebook has no room."

import itertools

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

from afno.mixers import AFNO2D
from afno.mixers.afno import record_zeros
from afno.spectral import Modes, irfft, irfft2, keep_modes, rfft, rfft2, self_conjugate


def relative(a, b):
    return ((a - b).norm() / b.norm().clamp_min(1e-300)).item()


RNG = np.random.default_rng(7)
GRIDS = [tuple(int(n) for n in RNG.integers(1, 131, 2)) for _ in range(40)]


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("grid", GRIDS, ids=lambda g: f"{g[0]}x{g[1]}")
def test_routes_agree(grid, dtype, limit):
    g = torch.Generator().manual_seed(grid[0] * 131 + grid[1])
    x = torch.randn(1, *grid, 2, dtype=dtype, generator=g)
    z = torch.randn(1, 2, grid[0], grid[1] // 2 + 1, 2, dtype=dtype, generator=g)
    out = {}
    for route in ("matmul", "fft"):
        a, b = x.clone().requires_grad_(), z.clone().requires_grad_()
        forward, inverse = rfft2(a, route=route), irfft2(b, grid, route=route)
        (forward * z).sum().backward()
        (inverse * x).sum().backward()
        out[route] = forward, inverse, a.grad, b.grad
    for one, other in zip(*out.values()):
        assert relative(one, other) < limit


@pytest.mark.parametrize("norm", ["ortho", "forward", "backward"])
@pytest.mark.parametrize("route", ["matmul", "fft"])
@pytest.mark.parametrize("grid", [(1, 1), (2, 3), (7, 8), (16, 9)])
def test_round_trip_and_numpy(grid, route, norm):
    x = torch.randn(2, *grid, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z = rfft2(x, norm=norm, route=route)
    full = np.fft.rfft2(x.numpy(), axes=(1, 2), norm=norm)
    np.testing.assert_allclose(z[:, 0].numpy() + 1j * z[:, 1].numpy(), full, atol=1e-11)
    assert relative(irfft2(z, grid, norm=norm, route=route), x) < 1e-13


@pytest.mark.parametrize("route", ["matmul", "fft"])
def test_inverse_makes_columns_self_conjugate(route):
    z = torch.randn(1, 2, 6, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert relative(irfft2(z, (6, 8), route=route), irfft2(self_conjugate(z, 8), (6, 8), route=route)) < 1e-13
    back = rfft2(irfft2(z, (6, 8), route=route))
    assert relative(back, self_conjugate(z, 8)) < 1e-13


@pytest.mark.parametrize("route", ["matmul", "fft"])
def test_an_explicit_row_set_is_honoured(route):
    modes = Modes((5, 2), 3)
    x = torch.randn(1, 9, 8, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    full = np.fft.rfft2(x.numpy(), axes=(1, 2), norm="ortho")[:, [5, 2], :3]
    z = rfft2(x, modes, route=route)
    np.testing.assert_allclose(z[:, 0].numpy() + 1j * z[:, 1].numpy(), full, atol=1e-12)
    spectrum = np.zeros((1, 9, 5, 1), complex)
    spectrum[:, [5, 2], :3] = full
    np.testing.assert_allclose(
        irfft2(z, (9, 8), modes, route=route).numpy(),
        np.fft.irfft2(spectrum, (9, 8), axes=(1, 2), norm="ortho"),
        atol=1e-12,
    )


def test_larger_shares_hold_smaller_ones():
    for grid in [(8, 8), (9, 14), (31, 6)]:
        sets = [keep_modes(grid, s) for s in (0.01, 0.1, 0.3, 0.5, 0.9, 1.0)]
        for small, large in itertools.pairwise(sets):
            assert set(small.rows) <= set(large.rows) and small.cols <= large.cols
        assert sets[-1] == keep_modes(grid)


def test_wrong_grid_is_refused():
    with pytest.raises(ValueError, match=r"8x5 coefficients, the kept set of this 9x8 grid has 9x5"):
        irfft2(torch.zeros(1, 2, 8, 5, 1), (9, 8))


def test_inference_mode_does_not_spoil_later_gradients():
    with torch.inference_mode():
        rfft2(torch.randn(1, 11, 13, 1), route="matmul")
    x = torch.randn(1, 11, 13, 1, requires_grad=True)
    rfft2(x, route="matmul").square().sum().backward()
    assert x.grad.norm() > 0


def test_one_dimension_truncated():
    x = torch.randn(2, 15, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for route in ("matmul", "fft"):
        z = rfft(x, 4, route=route)
        full = np.fft.rfft(x.numpy(), axis=1, norm="ortho")
        full[:, 4:] = 0
        np.testing.assert_allclose(
            irfft(z, 15, route=route).numpy(), np.fft.irfft(full, 15, axis=1, norm="ortho"), atol=1e-12
        )


def cpu_layer(route="matmul", dtype=torch.float64, **settings):
    torch.manual_seed(0)
    layer = AFNO2D(8, num_blocks=2, route=route, **settings)
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(15)
    return layer.to(dtype)


def gradients(layer, x, *names):
    layer.zero_grad()
    layer.requires_grad_(False)
    leaf = x.clone().requires_grad_("x" in names)
    wanted = [leaf if name == "x" else getattr(layer, name).requires_grad_() for name in names]
    y = layer(leaf)
    return y.grad_fn, torch.autograd.grad(y.square().sum(), wanted)


@pytest.mark.parametrize("names", [("w1",), ("b2",), ("w2", "b1"), ("x",), ("x", "w2"), ("x", "w1", "b1", "w2", "b2")])
def test_the_one_function_of_a_cpu_gives_only_gradients_that_are_asked_for(names):
    x = torch.randn(3, 5, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    (own, found), (_, expected) = (gradients(cpu_layer(route), x, *names) for route in ("matmul", "fft"))
    assert "MixPairs" in type(own).__name__
    for one, other in zip(found, expected):
        assert relative(one, other) < 1e-12


def test_whoever_looks_inside_gets_the_plain_steps():
    fast, plain = cpu_layer(), cpu_layer("fft")
    x, t = torch.randn(2, 1, 5, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    total, jacobian, hessian = (
        lambda m: lambda v: m(v).pow(3).sum(),
        torch.autograd.functional.jacobian,
        torch.autograd.functional.hessian,
    )
    ways = {
        "jvp": lambda m: torch.func.jvp(m, (x,), (t,))[1],
        "vmap": lambda m: torch.vmap(m)(torch.stack([x, t])),
        "grad": lambda m: torch.func.grad(total(m))(x),
        "batched gradient": lambda m: jacobian(lambda v: m(v).sum((1, 2)), x, vectorize=True),
        "second derivative": lambda m: hessian(total(m), x[:, :2, :3]),
        "exported": lambda m: torch.export.export(m, (x,)).module()(x),
    }
    for name, way in ways.items():
        assert relative(way(fast), way(plain)) < 1e-12, name
    assert not any("MixPairs" in str(node) for node in torch.export.export(fast, (x,)).graph.nodes)
    with forward_ad.dual_level():
        one, other = (forward_ad.unpack_dual(m(forward_ad.make_dual(x, t))).tangent for m in (fast, plain))
    assert relative(one, other) < 1e-12
    with record_zeros(fast) as zeros:
        fast(x)
    assert list(zeros) == ["shrink"]


@pytest.mark.parametrize(
    "shape, blocks", [((2, 14, 14, 96), 8), ((2, 31, 33, 16), 1), ((2, 56, 56, 96), 4), ((1, 112, 112, 16), 2)]
)
def test_float32_on_a_cpu_is_near_float64(shape, blocks):
    torch.manual_seed(0)
    layer = AFNO2D(shape[-1], num_blocks=blocks, sparsity_threshold=0.0)
    with torch.no_grad():
        layer.b1.add_(20)  # far from the knee of the ReLU, where rounding would decide
    x, g, results = torch.randn(shape), torch.randn(shape), []
    for dtype in (torch.float32, torch.float64):
        leaf = x.detach().clone().to(dtype).requires_grad_()
        y = layer.to(dtype)(leaf)
        results.append((y, *torch.autograd.grad(y, (leaf, *layer.parameters()), g.to(dtype))))
    for one, other in zip(*results):
        assert relative(one.double(), other) < 1e-5
