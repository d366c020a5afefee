"SegFormer where its notebook does not go: published counts, any picture, an independent reference, refusals, large pictures."

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from afno.complexity import count, operations
from afno.mixers import FNO2D, EfficientSelfAttention, build_mixer
from afno.models import segformer
from afno.models.mit import DEPTHS, STAGES, WIDTHS, stage_grids

MIXERS = list(WIDTHS)
TINY = dict(dims=[8, 16, 20, 32], depths=[1, 2, 1, 1], decoder_dim=16, img_size=64)
ENCODER = {"b0": 3_319_392, "b1": 13_151_424, "b2": 24_196_288, "b3": 44_072_128, "b4": 60_842_688, "b5": 81_443_008}
WHOLE = {"b0": 3_719_027, "b1": 13_682_131, "b2": 27_361_235, "b3": 47_237_075, "b4": 64_007_635, "b5": 84_607_955}


def tiny(mixer, seed=0, size="b0", **settings):
    "A model of five blocks."
    torch.manual_seed(seed)
    return segformer(size, mixer, **{"num_classes": 5, **TINY, **settings})


def pictures(h=33, w=47, batch=2, dtype=torch.float32):
    return torch.rand(batch, 3, h, w, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("size", ENCODER)
def test_published_counts(size):
    with torch.device("meta"):
        model = segformer(size, "efficient_attention")
    assert (parameters(model.encoder), parameters(model)) == (ENCODER[size], WHOLE[size])


def test_published_count_of_the_classifier():
    with torch.device("meta"):
        assert parameters(segformer("b3", "efficient_attention", 1000, "classes")) == 44_585_128


@pytest.mark.parametrize(("mixer", "millions"), [("afno", 47.1), ("gfn", 45.0), ("longshort", 45.4)])
def test_counts_near_the_papers_45m(mixer, millions):
    "Table 4's \"45M\" is B3 as it is pretrained, with ImageNet's 1000 classes and filters of 224 pixels."
    with torch.device("meta"):
        assert parameters(segformer("b3", mixer, 1000, "classes")) / 1e6 == pytest.approx(millions, abs=0.05)


@pytest.mark.parametrize("mixer", MIXERS)
def test_parameters_by_formula(mixer):
    "Every part of B1's encoder by formula; mixers counted one by one, alone."
    dims, total = WIDTHS[mixer][0], 0
    with torch.device("meta"):
        model = segformer("b1", mixer)
        for i, (d, n) in enumerate(zip(dims, DEPTHS["b1"])):
            before, k = (dims[i - 1], 3) if i else (3, 7)
            one = parameters(build_mixer(mixer, d, grid=stage_grids(224)[i], **STAGES[mixer][i]))
            mlp = (4 * d * d + 4 * d) + (36 * d + 4 * d) + (4 * d * d + d)
            total += k * k * before * d + d + 2 * d + n * (one + mlp + 4 * d) + 2 * d
    assert parameters(model.encoder) == total


@pytest.mark.parametrize("size", [(1, 1), (33, 47), (64, 64), (5, 130)])
@pytest.mark.parametrize("mixer", MIXERS)
def test_any_picture_and_each_by_itself(mixer, size):
    model, x = tiny(mixer).double().eval(), pictures(*size, dtype=torch.float64)
    with torch.no_grad():
        y = model(x)
        assert y.shape == (2, 5, *size) and y.isfinite().all()
        assert relative(model(x[1:]), y[1:]) < 1e-10


@pytest.mark.parametrize("mixer", MIXERS)
def test_classes(mixer):
    model = tiny(mixer, head="classes", num_classes=7).eval()
    with torch.no_grad():
        assert model(pictures()).shape == (2, 7)
        want = model.head.proj(model.encoder(pictures())[-1].flatten(1, 2).mean(1))
        assert relative(model(pictures()), want) < 1e-6


def test_gfn_off_its_grid():
    "Filters stored for 64 pixels serve other pictures; on their own grid a stage's filter is used as it is."
    model = tiny("gfn").eval()
    stored = [blocks[0].mixer.grid for blocks in model.encoder.blocks]
    assert stored == stage_grids(64)
    with torch.no_grad():
        for size in ((96, 64), (33, 47), (128, 256)):
            stages = model.encoder(pictures(*size))
            assert [tuple(s.shape[1:3]) for s in stages] == stage_grids(size)
            assert all(s.isfinite().all() for s in stages)


def layer_norm(x, norm):
    "Norm over the channels of (B, C, H, W)."
    mean = x.mean(1, keepdim=True)
    var = ((x - mean) ** 2).mean(1, keepdim=True)
    shape = (1, -1, 1, 1)
    return (x - mean) / (var + norm.eps).sqrt() * norm.weight.view(shape) + norm.bias.view(shape)


def reference_attention(x, mixer, heads):
    "Attention of (B, C, H, W) to a grid reduced by a strided convolution, in plain matrix products."
    B, C, H, W = x.shape
    r, keys = mixer.reduction, x
    if r > 1:
        weight = mixer.reduce.weight.view(C, r, r, C).permute(0, 3, 1, 2)
        padded = F.pad(x, (0, -W % r, 0, -H % r))
        keys = layer_norm(F.conv2d(padded, weight, mixer.reduce.bias, stride=r), mixer.norm)

    def flat(t):
        return t.flatten(2).transpose(1, 2)  # (B, n, C)

    q = flat(x) @ mixer.q.weight.T + mixer.q.bias
    k, v = (flat(keys) @ mixer.kv.weight.T + mixer.kv.bias).split(C, -1)
    out = []
    for part in torch.arange(C).chunk(heads):
        scores = q[..., part] @ k[..., part].transpose(1, 2) / len(part) ** 0.5
        out.append(scores.exp() / scores.exp().sum(-1, keepdim=True) @ v[..., part])
    y = torch.cat(out, -1) @ mixer.proj.weight.T + mixer.proj.bias
    return y.transpose(1, 2).reshape(B, C, H, W)


def reference_encoder(x, encoder, heads):
    "The four stages in (B, C, H, W)."
    found = []
    for i, (embed, blocks, norm) in enumerate(zip(encoder.embeds, encoder.blocks, encoder.norms)):
        stride, pad = (2, 1) if i else (4, 3)
        x = layer_norm(F.conv2d(x, embed.proj.weight, embed.proj.bias, stride, pad), embed.norm)
        for block in blocks:
            x = x + reference_attention(layer_norm(x, block.norm1), block.mixer, heads[i])
            mlp, y = block.mlp, layer_norm(x, block.norm2)
            y = F.conv2d(y, mlp.fc1.weight[..., None, None], mlp.fc1.bias)
            y = F.conv2d(y, mlp.depthwise.weight, mlp.depthwise.bias, padding=1, groups=y.shape[1])
            x = x + F.conv2d(F.gelu(y), mlp.fc2.weight[..., None, None], mlp.fc2.bias)
        x = layer_norm(x, norm)
        found.append(x)
    return found


def reference_decoder(stages, head):
    "Logits at a quarter of the picture's size."
    maps = [F.conv2d(x, m.weight[..., None, None], m.bias) for x, m in zip(stages, head.linears)]
    size = maps[0].shape[2:]
    maps = [F.interpolate(m, size, mode="bilinear", align_corners=False) for m in maps]
    x = F.conv2d(torch.cat(maps[::-1], 1), head.fuse.weight)
    scale = head.norm.weight / (head.norm.running_var + head.norm.eps).sqrt()
    x = (x - head.norm.running_mean.view(1, -1, 1, 1)) * scale.view(1, -1, 1, 1) + head.norm.bias.view(1, -1, 1, 1)
    return F.conv2d(x.relu(), head.classify.weight, head.classify.bias)


@pytest.mark.parametrize("size", [(64, 64), (33, 47), (40, 96)])
def test_against_a_plain_reference(size):
    heads = (1, 2, 5, 8)
    model = tiny("efficient_attention").double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, dtype=p.dtype))
        model.head.norm.running_mean.normal_()
        model.head.norm.running_var.uniform_(0.5, 2)
        x = pictures(*size, dtype=torch.float64)
        stages = reference_encoder(x, model.encoder, heads)
        for ours, want in zip(model.encoder(x), stages, strict=True):
            assert relative(ours.permute(0, 3, 1, 2), want) < 1e-10
        want = F.interpolate(reference_decoder(stages, model.head), size, mode="bilinear", align_corners=False)
        assert relative(model(x), want) < 1e-10


@pytest.mark.parametrize("mixer", MIXERS)
def test_compiles_in_one_graph(mixer):
    torch._dynamo.reset()
    model, x = tiny(mixer).eval(), pictures(32, 64)
    with torch.no_grad():
        assert relative(torch.compile(model, backend="eager", fullgraph=True)(x), model(x)) < 1e-5


@pytest.mark.parametrize("mixer", MIXERS)
def test_checkpointing_changes_no_gradient(mixer):
    gradients = []
    for checkpointing in (False, True):
        model = tiny(mixer, checkpointing=checkpointing, drop_path=0.3).train()
        torch.manual_seed(5)
        model(pictures(32, 64)).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert len(gradients[0]) == parameters(model)
    assert relative(gradients[1], gradients[0]) < 1e-5


def test_weights_start_as_described():
    model = tiny("efficient_attention", dims=[64, 128, 160, 256])
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.1), name
            assert not module.bias.any(), name
        if isinstance(module, torch.nn.Conv2d) and module.weight.numel() > 1000:
            fan_out = module.kernel_size[0] ** 2 * module.out_channels / module.groups
            assert module.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.1), name


def test_settings_reach_every_stage():
    model = tiny("afno", mixer_settings={"modes": 0.25, "skip": "conv"})
    for blocks, settings in zip(model.encoder.blocks, STAGES["afno"]):
        for block in blocks:
            assert (block.mixer.modes, block.mixer.num_blocks) == (0.25, settings["num_blocks"])
            assert isinstance(block.mixer.skip, torch.nn.Linear)


@pytest.mark.parametrize(
    ("mixer", "total", "mixers"),
    [("efficient_attention", 380.1, 129.9), ("longshort", 407.8, 84.3), ("gfn", 362.8, 0.0), ("afno", 439.7, None)],
)
def test_table_4(mixer, total, mixers):
    with torch.device("meta"):
        found = count(segformer("b3", mixer), (3, 1024, 1024), "table4")
    assert found.total_macs / 1e9 == pytest.approx(total, rel=2e-3)
    assert mixers is None or found.mixer_macs / 1e9 == pytest.approx(mixers, abs=0.1)
    assert "other" not in found.parameters


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(size="b9"), "size='b9' is unknown; known are b0, b1, b2, b3, b4, b5"),
        (dict(mixer="afn"), "did you mean 'afno'"),
        (dict(head="pixels"), "head='pixels' is unknown; allowed are segments and classes"),
        (dict(num_classes=0), "num_classes=0 is not allowed"),
        (dict(dims=[8, 8]), "dims=[8, 8] is not allowed; give four integers"),
        (dict(depths=[1, 1, 0, 1]), "depths=[1, 1, 0, 1] is not allowed; give four integers"),
        (dict(mixer="fno"), "no widths for mixer 'fno'"),
        (dict(mixer_settings={"num_block": 2}), "did you mean 'num_blocks'"),
        (dict(mixer_settings={"num_blocks": 5}), "num_blocks=5 does not divide dim=104"),
        (dict(img_size=0), "img_size=0 is empty"),
    ],
)
def test_refuses_in_one_line(settings, message):
    with pytest.raises(ValueError) as error:
        segformer(**{"size": "b0", **settings})
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 32, 32, 3), (1, 3, 0, 32)])
def test_refuses_what_is_no_picture(shape):
    with pytest.raises(ValueError, match=r"allowed is \(B, 3, h, w\)"):
        tiny("gfn")(torch.zeros(shape))


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["afno", "efficient_attention"])
def test_a_street_picture(mixer):
    "Cityscapes' 1024x2048 through B0."
    model = segformer("b0", mixer).eval()
    with torch.no_grad():
        y = model(pictures(1024, 2048, batch=1))
    assert y.shape == (1, 19, 1024, 2048) and y.isfinite().all()


@pytest.mark.slow
def test_b3_on_a_crop_needs_less_than_24_gib():
    "Peak memory of a process of its own, forward only."
    code = (
        "import resource, sys, torch; from afno.models import segformer\n"
        "with torch.no_grad(): y = segformer('b3', 'afno').eval()(torch.rand(1, 3, 1024, 1024))\n"
        "assert y.isfinite().all()\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(peak * (1 if sys.platform == 'darwin' else 1024))"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert 2**28 < int(out) < 24 * 2**30


@pytest.mark.parametrize("mixer", MIXERS)
def test_count_says_what_runs(mixer):
    with torch.device("meta"):
        model = segformer("b0", mixer, img_size=(96, 160))  # the grids of GFN's filters: resampling is not counted
    said, ran = count(model, (3, 96, 160)), operations(model, (3, 96, 160))
    assert {p: n for p, n in said.macs.items() if "." not in p} == {p: n for p, n in ran.items() if "." not in p}
    products = said.mixer_macs - said.macs.get("mixers.transforms", 0) - said.macs.get("mixers.filter", 0)
    assert products == ran.get("mixers.products", 0)


@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 0.1), (torch.float16, 0.02)])
def test_half_precision_is_near(dtype, limit):
    torch.manual_seed(0)
    model, x = segformer("b0", "afno", 5, **TINY).eval(), torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        exact, half = model.double()(x.double()), model.to(dtype)(x.to(dtype))
    assert half.dtype == dtype and (half.double() - exact).norm() / exact.norm() < limit


def test_a_quarter_of_the_coefficients_costs_a_quarter():
    with torch.device("meta"):
        whole, part = (segformer("b3", "afno", mixer_settings=s) for s in ({}, {"modes": 0.25}))
    cost = [count(m, (3, 1024, 1024)).macs["mixers.block_mlp"] for m in (whole, part)]
    assert 0.25 <= cost[1] / cost[0] < 0.27 and parameters(whole) == parameters(part)


def test_fno_refuses_another_width_and_reduction_is_a_convolution():
    with pytest.raises(ValueError, match="input has 4 channels, allowed is dim=8"):
        FNO2D(8, (4, 4))(torch.zeros(1, 4, 4, 4))
    layer = EfficientSelfAttention(6, 2, 2)
    x = torch.randn(1, 4, 6, 6)
    kernel = layer.reduce.weight.unflatten(1, (2, 2, 6)).permute(0, 3, 1, 2).contiguous()
    conv = torch.nn.functional.conv2d(x.permute(0, 3, 1, 2).contiguous(), kernel, layer.reduce.bias, stride=2)
    assert torch.allclose(layer.coarse(x), layer.norm(conv.flatten(2).transpose(1, 2)), atol=1e-5)
