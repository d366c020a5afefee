"The vision transformer where its notebook does not go: float types, compilation, files, brute-force equivalents, refusals."

import math
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from afno.models import SIZES, VisionTransformer, vit
from afno.models.layers import PatchEmbed, PixelHead, SegmentHead, resample_pos_embed

MIXERS = list(SIZES["b4"])
FEW = {"attention": {"num_heads": 4}, "longshort": {"num_heads": 4, "rank": 2}, "gfn": {}, "afno": {"num_blocks": 4}}


def small(mixer, seed=0, size="b4", **settings):
    "A model of two blocks for 32x32 pictures."
    torch.manual_seed(seed)
    settings = {"img_size": 32, "dim": 24, "depth": 2, "mixer_settings": FEW[mixer], **settings}
    return vit(size, mixer, **settings)


def pictures(h=32, w=32, batch=2, dtype=torch.float64):
    return torch.rand(batch, 3, h, w, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float16, 2e-2), (torch.bfloat16, 8e-2), (torch.float32, 1e-5), (torch.float64, 1e-13)]
)
def test_any_float_type(mixer, dtype, limit):
    exact = small(mixer).double().eval()(pictures(20, 36))
    y = small(mixer).to(dtype).eval()(pictures(20, 36, dtype=dtype))
    assert y.dtype == dtype and relative(y, exact) < limit


@pytest.mark.parametrize("mixer", MIXERS)
def test_autocast_trains(mixer):
    model = small(mixer, drop_path=0.1).train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(pictures(dtype=torch.float32)).float().square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("size", [(32, 32), (20, 36)], ids=["learned grid", "other grid"])
def test_compiles_in_one_graph(mixer, backend, size):
    torch._dynamo.reset()
    model, x = small(mixer).train(), pictures(*size, dtype=torch.float32)
    results = []
    for fn in (model, torch.compile(model, backend=backend, fullgraph=True)):
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="(?i).*complex.*")
            y = fn(x)
            y.square().sum().backward()
        results.append((y.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])))
    for plain, compiled in zip(*results):
        assert relative(compiled, plain) < 1e-4


def test_stochastic_depth_compiles():
    torch._dynamo.reset()
    model = small("gfn", drop_path=0.5).train()
    y = torch.compile(model, backend="aot_eager", fullgraph=True)(pictures(dtype=torch.float32))
    assert y.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("mixer", MIXERS)
def test_inductor(mixer):
    torch._dynamo.reset()
    model, x = small(mixer).eval(), pictures(20, 36, dtype=torch.float32)
    with torch.no_grad():
        assert relative(torch.compile(model, fullgraph=True)(x), model(x)) < 1e-4


@pytest.mark.parametrize("mixer", MIXERS)
def test_weights_load_from_a_file(mixer, tmp_path):
    first, second = small(mixer, seed=0).eval(), small(mixer, seed=1).eval()
    x = pictures(dtype=torch.float32)
    assert relative(second(x), first(x)) > 1e-3
    torch.save(first.state_dict(), tmp_path / "weights.pt")
    second.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert torch.equal(second(x), first(x))


@pytest.mark.parametrize("mixer", MIXERS)
def test_same_seed_same_weights(mixer):
    a, b, c = (small(mixer, seed=s).state_dict() for s in (3, 3, 4))
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["embed.proj.weight"], c["embed.proj.weight"])


@pytest.mark.parametrize("mixer", MIXERS)
def test_linear_layers_start_alike(mixer):
    model = small(mixer, dim=96)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert abs(module.weight.std().item() - 0.02) < 0.004, name
            assert not module.bias.any(), name


@pytest.mark.parametrize("mixer", MIXERS)
def test_learns_one_picture(mixer):
    model, x = small(mixer), pictures(dtype=torch.float32)
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for _ in range(30):
        loss = (model(x) - x).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("mixer", MIXERS)
def test_pictures_do_not_see_each_other(mixer):
    model, x = small(mixer).double().eval(), pictures(28, 12, batch=3)
    assert relative(model(x[1:2]), model(x)[1:2]) < 1e-12


def keys(t, a=-0.75):
    "The cubic convolution kernel."
    t = abs(t)
    if t <= 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0


def bicubic_matrix(old, new):
    "Interpolation by centres, borders repeated, as a (new, old) matrix."
    m = torch.zeros(new, old, dtype=torch.float64)
    for i in range(new):
        x = (i + 0.5) * old / new - 0.5
        for j in range(math.floor(x) - 1, math.floor(x) + 3):
            m[i, min(max(j, 0), old - 1)] += keys(x - j)
    return m


@pytest.mark.parametrize("grid", [(8, 8), (5, 9), (1, 1), (16, 3), (7, 20)])
def test_positions_resample_as_by_hand(grid):
    pos = torch.randn(1, 6, 7, 3, dtype=torch.float64)
    want = torch.einsum("yh,xw,bhwc->byxc", bicubic_matrix(6, grid[0]), bicubic_matrix(7, grid[1]), pos)
    assert relative(resample_pos_embed(pos, grid), want) < 1e-12
    assert resample_pos_embed(pos.half(), grid).dtype == torch.float16


@pytest.mark.parametrize("patch", [1, 3, 4])
def test_patches_in_and_pixels_out_by_hand(patch):
    "Loops over patches and pixels; the order of a token's numbers is (channel, row, column)."
    H, W, C = 2, 3, 5
    x = torch.rand(1, 3, H * patch, W * patch, dtype=torch.float64)
    embed, head = PatchEmbed(C, patch).double(), SegmentHead(C, 2, patch).double()
    tokens = embed(x)
    out = head(tokens)
    for i in range(H):
        for j in range(W):
            box = x[0, :, i * patch : (i + 1) * patch, j * patch : (j + 1) * patch]
            want = embed.proj.weight.flatten(1) @ box.flatten() + embed.proj.bias
            assert torch.allclose(tokens[0, i, j], want)
            numbers = head.proj(tokens[0, i, j])
            for c in range(2):
                for r in range(patch):
                    for s in range(patch):
                        number = numbers[c * patch**2 + r * patch + s]
                        assert torch.allclose(out[0, c, i * patch + r, j * patch + s], number)


def test_oblong_learned_grid_is_rows_first():
    model = small("gfn", img_size=(20, 36))
    assert model.grid == (5, 9) and model.pos_embed.shape == (1, 5, 9, 24)
    assert model.blocks[0].mixer.grid == (5, 9)
    assert model(pictures(20, 36, dtype=torch.float32)).shape == (2, 3, 20, 36)


@pytest.mark.parametrize(("head", "shape"), [("classes", (2, 6)), ("segments", (2, 6, 20, 36))])
@pytest.mark.parametrize("mixer", MIXERS)
def test_heads_for_every_mixer(mixer, head, shape):
    y = small(mixer, head=head, num_classes=6, size="s4")(pictures(20, 36, dtype=torch.float32))
    assert y.shape == shape and y.isfinite().all()


def test_named_sizes_are_not_changed_by_overrides():
    before = repr(SIZES)
    small("afno", mixer_settings={"num_blocks": 2, "skip": "none"})
    assert repr(SIZES) == before


@pytest.mark.parametrize("mixer", MIXERS)
def test_checkpointing_changes_no_gradient(mixer):
    x, gradients = pictures(dtype=torch.float32), []
    for checkpointing in (False, True):
        model = small(mixer, checkpointing=checkpointing, drop_path=0.3).train()
        torch.manual_seed(5)
        model(x).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert relative(gradients[1], gradients[0]) < 1e-6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(size="b5"), "size='b5' is unknown; known are b4, s4, xs4"),
        (dict(mixer="atention"), "did you mean 'attention'"),
        (dict(head="pixles"), "did you mean 'pixels'"),
        (dict(head="classes"), "give the number of classes"),
        (dict(head="segments", num_classes=0), "num_classes=0"),
        (dict(num_classes=3), "leave it out"),
        (dict(widht=3), "vit has no setting 'widht'; it has dim, depth"),
        (dict(mixer_settings={"num_block": 4}), "did you mean 'num_blocks'"),
        (dict(mixer_settings={"num_blocks": 5}), "num_blocks=5 does not divide dim=24; use 4 or 6"),
        (dict(img_size=30), "picture of 30x30 pixels; both sides must be multiples of patch_size=4"),
        (dict(img_size=(32, 30)), "crop or pad to 32x28 or 32x32"),
        (dict(img_size=0), "must be at least 1"),
        (dict(depth=0), "depth=0 is not allowed"),
        (dict(dim=24.0), "dim=24.0 is not allowed"),
        (dict(mlp_ratio=0.0), "leaves no hidden channel"),
        (dict(drop_path=1.0), "drop_path=1.0 is no probability below 1"),
    ],
)
def test_refuses_in_one_line(settings, message):
    with pytest.raises(ValueError) as error:
        vit(**{"size": "b4", "mixer": "afno", "img_size": 32, "dim": 24, "depth": 1, **settings})
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 3, 32, 30), "picture of 32x30 pixels; both sides must be multiples of patch_size=4"),
        ((1, 3, 2, 32), "crop or pad to 4x32"),
        ((3, 32, 32), "allowed is (B, 3, h, w)"),
        ((1, 32, 32, 3), "move colours to axis 1"),
    ],
)
def test_refuses_pictures_at_run_time(shape, message):
    with pytest.raises(ValueError) as error:
        small("gfn")(torch.zeros(shape))
    assert message in str(error.value)


def test_module_never_hides_the_function():
    code = (
        "import afno.models.vision_transformer as m; from afno.models import vit; assert vit is m.vit and callable(vit)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_direct_construction_needs_no_named_size():
    model = VisionTransformer("gfn", dim=8, depth=1, patch_size=2, img_size=8)
    assert isinstance(model.head, PixelHead) and model(torch.zeros(1, 3, 8, 8)).shape == (1, 3, 8, 8)
