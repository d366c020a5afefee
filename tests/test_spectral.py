"The transforms against each other and against NumPy, where the notebook has no room."

import itertools

import numpy as np
import pytest
import torch

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
