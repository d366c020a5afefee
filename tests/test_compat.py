"Public layers: their stored outputs, and their rules against a plain torch.fft version of the layer."

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from afno.compat import KINDS, load, resize_raw
from afno.mixers.afno import AFNO2D

GOLDEN = Path(__file__).parent / "golden"
OURS = {"k": "num_blocks", "lam": "sparsity_threshold", "factor": "expansion", "heads": "num_heads"}
KIND = {
    "nvlabs_afno2d": "nvlabs/afno2d",
    "nvlabs_legacy": "nvlabs/afno2d-legacy",
    "nvlabs_afno1d": "nvlabs/afno1d",
    "fourcastnet": "fourcastnet/afno2d",
    "gfnet": "gfnet/globalfilter",
    "transformer": "transformer-ls/attention",
}
FILES = sorted(f.stem for f in GOLDEN.glob("*.npz"))


def stored(stem):
    "Kind, weights, settings under our names, tokens as a grid, output."
    z = np.load(GOLDEN / f"{stem}.npz")
    kind = next(kind for start, kind in KIND.items() if stem.startswith(start))
    meta = {k[5:]: z[k].item() for k in z.files if k.startswith("meta.")}
    x, y = torch.tensor(z["x"]), torch.tensor(z["y"])
    if "H" in meta:
        x, y = (
            t.view(-1, meta.pop("H") if last else meta["H"], meta["W"], t.shape[-1]) for last, t in ((0, x), (1, y))
        )
    meta.pop("W", None)
    weights = {k[2:]: torch.tensor(z[k]) for k in z.files if k.startswith("w.")}
    return kind, weights, {OURS.get(k, k): v for k, v in meta.items()}, x, y


def test_every_file_is_there():
    elsewhere = {"physicsnemo/afno2d", "segformer/mit"}  # derived from another's below; test_compat_segformer.py
    assert len(FILES) == 17 and {stored(f)[0] for f in FILES} | elsewhere == set(KINDS)


@pytest.mark.parametrize("route", ["fft", "matmul"])
@pytest.mark.parametrize("stem", FILES)
def test_stored_output(stem, route):
    kind, weights, settings, x, y = stored(stem)
    extra = {} if kind == "transformer-ls/attention" else {"route": route}
    layer = load(kind, weights, **settings, **extra)
    assert (layer(x) - y).abs().max() < 1e-5
    assert (layer.double()(x.double()) - y).abs().max() < 1e-5


@pytest.mark.parametrize("stem", FILES)
def test_inferred_from_shapes(stem):
    kind, weights, settings, x, y = stored(stem)
    settings = {k: v for k, v in settings.items() if k not in ("num_blocks", "expansion", "rank")}
    assert (load(kind, weights, **settings)(x) - y).abs().max() < 1e-5


@pytest.mark.parametrize("stem", [f for f in FILES if f.startswith("fourcastnet")])
def test_physicsnemo_in_both_layouts(stem):
    _, weights, settings, x, y = stored(stem)
    last = {k: v.movedim(0, -1) if k[0] == "w" else v.movedim(0, -1)[:, :, None, None] for k, v in weights.items()}
    for layout in (weights, last):
        assert (load("physicsnemo/afno2d", layout, **settings)(x) - y).abs().max() < 1e-5


def test_own_low_pass_is_not_theirs():
    _, weights, _, x, y = stored("fourcastnet_afno2d_sq16_f50")
    ours = AFNO2D(32, 4, 0.01, modes=0.5)
    ours.load_state_dict(weights)
    assert (ours(x) - y).abs().max() > 1e-2


def plain_layer(x, w, lam, rows, cols):
    "The block MLP on z[:, rows, :cols] with complex numbers; everything else is zero."
    z = torch.fft.rfft2(x, dim=(1, 2), norm="ortho")
    w1, b1, w2, b2 = (torch.complex(w[n][0], w[n][1]) for n in ("w1", "b1", "w2", "b2"))
    part = z[:, rows, :cols].unflatten(-1, w1.shape[:2])
    part = torch.einsum("bhwki,kio->bhwko", part, w1) + b1
    part = torch.complex(part.real.relu(), part.imag.relu())
    part = (torch.einsum("bhwki,kio->bhwko", part, w2) + b2).flatten(-2)
    out = torch.zeros_like(z)
    out[:, rows, :cols] = torch.complex(F.softshrink(part.real, lam), F.softshrink(part.imag, lam))
    return torch.fft.irfft2(out, x.shape[1:3], dim=(1, 2), norm="ortho") + x


def random_weights(seed, blocks=2, width=3, factor=2):
    g = torch.Generator().manual_seed(seed)
    shapes = {"w1": (width, width * factor), "b1": (width * factor,), "w2": (width * factor, width), "b2": (width,)}
    return {k: torch.randn(2, blocks, *s, generator=g, dtype=torch.float64) for k, s in shapes.items()}


@pytest.mark.parametrize("fraction", [0.0, 0.003, 0.02, 0.1, 0.3, 0.5, 0.77, 1.0])
@pytest.mark.parametrize("grid", [(1, 1), (1, 7), (6, 1), (5, 7), (8, 8), (7, 12), (12, 6)], ids=str)
@pytest.mark.parametrize("kind", ["nvlabs/afno2d", "fourcastnet/afno2d", "nvlabs/afno1d"])
def test_rules_on_other_grids(kind, grid, fraction):
    if kind == "nvlabs/afno1d":
        grid = (1, grid[0] * grid[1])
    w, x = (
        random_weights(sum(grid)),
        torch.randn(2, *grid, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
    )
    if kind == "fourcastnet/afno2d":
        total = grid[0] // 2 + 1
        kept = int(total * fraction)
        rows, cols = slice(total - kept, total + kept), kept
    else:
        rows, cols = slice(None), int((grid[0] * grid[1] // 2 + 1) * fraction)
    expected = plain_layer(x, w, 0.1, rows, cols)
    for route in ("fft", "matmul"):
        layer = load(kind, w, sparsity_threshold=0.1, fraction=fraction, route=route)
        y = layer(x[:, 0])[:, None] if kind == "nvlabs/afno1d" else layer(x)
        assert (y - expected).abs().max() < 1e-11


def test_legacy_local_term_is_a_convolution_or_nothing():
    _, weights, settings, x, y = stored("nvlabs_legacy_conv_bias")
    bare = {k: v for k, v in weights.items() if not k.startswith("bias")}
    conv = F.conv1d(x.flatten(1, 2).mT, weights["bias.weight"], weights["bias.bias"]).mT.view_as(x)
    assert (load("nvlabs/afno2d-legacy", bare, **settings)(x) + conv - y).abs().max() < 1e-5


def keys_cubic(t):
    "Keys' cubic kernel with a = -0.75."
    a, t = -0.75, abs(t)
    if t <= 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0


def cubic_matrix(old, new):
    "Bicubic interpolation along one axis, corners aligned, border repeated."
    m = np.zeros((new, old))
    for i in range(new):
        at = i * (old - 1) / (new - 1)
        for tap in range(int(np.floor(at)) - 1, int(np.floor(at)) + 3):
            m[i, min(max(tap, 0), old - 1)] += keys_cubic(at - tap)
    return m


@pytest.mark.parametrize("grid", [(16, 16), (5, 7), (12, 10)], ids=str)
def test_gfnet_resize_is_bicubic_in_raw_order(grid):
    _, weights, _, x, _ = stored("gfnet_globalfilter")
    weight = weights["complex_weight"].double()
    size = (grid[0], grid[1] // 2 + 1)
    expected = np.einsum("yh,xw,hwcp->yxcp", cubic_matrix(8, size[0]), cubic_matrix(5, size[1]), weight.numpy())
    assert np.abs(resize_raw(weight, size).numpy() - expected).max() < 1e-12
    layer = load("gfnet/globalfilter", {"complex_weight": weight}, grid=grid)
    x = torch.randn(2, *grid, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z = torch.fft.rfft2(x, dim=(1, 2), norm="ortho") * torch.view_as_complex(torch.tensor(expected))
    assert (layer(x) - torch.fft.irfft2(z, grid, dim=(1, 2), norm="ortho")).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "stem",
    [
        "nvlabs_afno2d_odd7x9",
        "fourcastnet_afno2d_sq16_f50",
        "nvlabs_afno1d_odd",
        "gfnet_globalfilter",
        "transformer_ls_attention",
    ],
)
def test_weights_keep_their_dtype(stem, dtype):
    kind, weights, settings, x, y = stored(stem)
    layer = load(kind, {k: v.to(dtype) for k, v in weights.items()}, **settings)
    out = layer(x.to(dtype))
    assert out.dtype == dtype and {p.dtype for p in layer.parameters()} == {dtype}
    assert (out.double() - y).norm() < 0.03 * y.norm()


def test_loading_copies():
    kind, weights, settings, x, y = stored("nvlabs_afno2d_sq16")
    layer = load(kind, weights, **settings)
    for v in weights.values():
        v.zero_()
    assert (layer(x) - y).abs().max() < 1e-5


AFNO, LS, GF = (stored(f)[1] for f in ("nvlabs_afno2d_sq16", "transformer_ls_attention", "gfnet_globalfilter"))


@pytest.mark.parametrize(
    "kind, weights, settings, words",
    [
        ("segformer/head", {}, {}, list(KINDS)),
        ("nvlabs/afno2", AFNO, {}, ["did you mean 'nvlabs/afno2d'"]),
        ("nvlabs/afno2d", AFNO, {"window": 4}, ["no setting 'window'", "sparsity_threshold"]),
        ("nvlabs/afno2d", {k: v for k, v in AFNO.items() if k != "b1"}, {}, ["missing b1"]),
        ("nvlabs/afno2d", AFNO | {"w3": AFNO["w1"]}, {}, ["unexpected w3"]),
        (
            "nvlabs/afno2d",
            {f"filter.{k}": v for k, v in AFNO.items()},
            {},
            ["missing w1", "strip its prefix 'filter.'"],
        ),
        ("nvlabs/afno2d", AFNO | {"w2": torch.ones(2, 4, 8, 7)}, {}, ["w2", "(2, 4, 8, 7)", "(2, 4, 8, 8)"]),
        ("nvlabs/afno2d", AFNO, {"num_blocks": 8}, ["num_blocks=8", "num_blocks=4"]),
        ("nvlabs/afno2d", AFNO, {"expansion": 2}, ["expansion=2", "expansion=1"]),
        ("fourcastnet/afno2d", AFNO, {"fraction": 1.5}, ["fraction=1.5"]),
        ("nvlabs/afno2d-legacy", AFNO | {"bias.bias": torch.ones(32)}, {}, ["missing bias.weight"]),
        ("physicsnemo/afno2d", AFNO | {"b1": torch.ones(4, 8, 1, 1, 2)}, {}, ["b2", "distributed"]),
        ("gfnet/globalfilter", {"complex_weight": torch.ones(8, 5, 16)}, {}, ["(8, 5, 16)", "(h, w//2+1, C, 2)"]),
        ("transformer-ls/attention", LS, {}, ["12", "give num_heads or rank"]),
        ("transformer-ls/attention", LS, {"num_heads": 5}, ["num_heads=5", "12"]),
        ("transformer-ls/attention", LS, {"num_heads": 0, "rank": 3}, ["num_heads=0"]),
        ("transformer-ls/attention", LS, {"num_heads": 4, "rank": 2}, ["rank=2", "rank=3"]),
        ("transformer-ls/attention", LS | {"proj.bias": torch.ones(31)}, {"rank": 3}, ["proj.bias", "(31,)", "(32,)"]),
    ],
)
def test_refuses_in_one_line(kind, weights, settings, words):
    with pytest.raises(ValueError) as error:
        load(kind, weights, **settings)
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    "kind, weights, settings", [("nvlabs/afno2d", AFNO, {"grid": (16, 16)}), ("gfnet/globalfilter", GF, {})]
)
def test_other_grids_are_refused_where_one_was_named(kind, weights, settings):
    with pytest.raises(ValueError, match="grid of 9x9"):
        load(kind, weights, **settings)(torch.zeros(1, 9, 9, 32 if kind == "nvlabs/afno2d" else 16))
