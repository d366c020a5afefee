"SegFormer's encoder: the original written plainly in (B, C, H, W) and (B, N, C), with random weights under its own names."

import pytest
import torch
import torch.nn.functional as F

from afno.compat import load
from afno.mixers import EfficientSelfAttention

DIMS, DEPTHS, HEADS, SR = [8, 16, 20, 32], [1, 2, 1, 3], (1, 2, 5, 8), (8, 4, 2, 1)


def original(bias=True, head=False, seed=0):
    g = torch.Generator().manual_seed(seed)
    s = {}

    def put(name, *shape, b=True):
        s[name + ".weight"] = 0.3 * torch.randn(*shape, generator=g, dtype=torch.float64)
        if b:
            s[name + ".bias"] = 0.3 * torch.randn(shape[0], generator=g, dtype=torch.float64)

    before = 3
    for i, (d, n, r) in enumerate(zip(DIMS, DEPTHS, SR), 1):
        k = 7 if i == 1 else 3
        put(f"patch_embed{i}.proj", d, before, k, k)
        put(f"patch_embed{i}.norm", d)
        for j in range(n):
            p = f"block{i}.{j}."
            put(p + "norm1", d)
            put(p + "norm2", d)
            put(p + "attn.q", d, d, b=bias)
            put(p + "attn.kv", 2 * d, d, b=bias)
            put(p + "attn.proj", d, d)
            if r > 1:
                put(p + "attn.sr", d, d, r, r)
                put(p + "attn.norm", d)
            put(p + "mlp.fc1", 4 * d, d)
            put(p + "mlp.dwconv.dwconv", 4 * d, 1, 3, 3)
            put(p + "mlp.fc2", d, 4 * d)
        put(f"norm{i}", d)
        before = d
    if head:
        put("head", 10, DIMS[-1])
    return s


def reference(s, x):
    def lin(t, n):
        return F.linear(t, s[n + ".weight"], s.get(n + ".bias"))

    def ln(t, n, eps):
        return F.layer_norm(t, t.shape[-1:], s[n + ".weight"], s[n + ".bias"], eps)

    outs = []
    for i, (_d, n, r, h) in enumerate(zip(DIMS, DEPTHS, SR, HEADS), 1):
        x = F.conv2d(
            x, s[f"patch_embed{i}.proj.weight"], s[f"patch_embed{i}.proj.bias"], 4 if i == 1 else 2, 3 if i == 1 else 1
        )
        B, C, H, W = x.shape
        x = ln(x.flatten(2).transpose(1, 2), f"patch_embed{i}.norm", 1e-5)
        for j in range(n):
            p = f"block{i}.{j}."
            y = ln(x, p + "norm1", 1e-6)
            q = lin(y, p + "attn.q").view(B, -1, h, C // h).permute(0, 2, 1, 3)
            z = y
            if r > 1:
                z = F.conv2d(y.transpose(1, 2).reshape(B, C, H, W), s[p + "attn.sr.weight"], s[p + "attn.sr.bias"], r)
                z = ln(z.flatten(2).transpose(1, 2), p + "attn.norm", 1e-5)
            kv = lin(z, p + "attn.kv").view(B, -1, 2, h, C // h).permute(2, 0, 3, 1, 4)
            a = (q @ kv[0].transpose(-1, -2) * (C // h) ** -0.5).softmax(-1)
            x = x + lin((a @ kv[1]).transpose(1, 2).reshape(B, -1, C), p + "attn.proj")
            y = lin(ln(x, p + "norm2", 1e-6), p + "mlp.fc1").transpose(1, 2).reshape(B, -1, H, W)
            y = F.conv2d(y, s[p + "mlp.dwconv.dwconv.weight"], s[p + "mlp.dwconv.dwconv.bias"], padding=1, groups=4 * C)
            x = x + lin(F.gelu(y.flatten(2).transpose(1, 2)), p + "mlp.fc2")
        x = ln(x, f"norm{i}", 1e-6).transpose(1, 2).reshape(B, C, H, W)
        outs.append(x)
    return outs


@pytest.mark.parametrize("size", [(64, 64), (33, 47), (70, 100)])
@pytest.mark.parametrize("bias", [True, False])
def test_same_output(size, bias):
    s, x = original(bias, head=bias), torch.rand(2, 3, *size, dtype=torch.float64)
    for ours, want in zip(load("segformer/mit", s)(x), reference(s, x), strict=True):
        assert ((ours.permute(0, 3, 1, 2) - want).norm() / want.norm()) < 1e-10


def test_dropping_matters():
    "The original's rule tells itself from ours on a grid that 8 does not divide."
    s, x = original(), torch.rand(1, 3, 44, 52, dtype=torch.float64)
    enc = load("segformer/mit", s)
    theirs = enc(x)[0]
    for b in enc.blocks[0]:
        b.mixer.__class__ = EfficientSelfAttention
    assert (enc(x)[0] - theirs).norm() / theirs.norm() > 1e-3


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (lambda s: {"backbone." + k: v for k, v in s.items()}, {}, "strip its prefix 'backbone.'"),
        (lambda s: {k: v for k, v in s.items() if k != "norm3.bias"}, {}, "missing norm3.bias"),
        (lambda s: s | {"block2.1.attn.q.weight": torch.ones(3, 3)}, {}, "block2.1.attn.q.weight has shape (3, 3)"),
        (lambda s: s, {"num_heads": (1, 3, 5, 8)}, "num_heads=3"),
        (lambda s: s, {"depths": [1, 2, 1, 2]}, "depths[3]=2 contradicts"),
        (lambda s: s | {"patch_embed1.proj.weight": torch.ones(8, 3)}, {}, "patch_embed1.proj.weight has shape (8, 3)"),
        (lambda s: {}, {}, "missing"),
    ],
)
def test_refuses(change, settings, message):
    with pytest.raises(ValueError) as e:
        load("segformer/mit", change(original()), **settings)
    assert message in str(e.value) and "\n" not in str(e.value)
    assert len(str(e.value)) < 1500


def test_too_small():
    with pytest.raises(ValueError, match="below the reduction of 8"):
        load("segformer/mit", original())(torch.rand(1, 3, 16, 64, dtype=torch.float64))
