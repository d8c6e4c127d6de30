"""diffusers: a UNet as a whole, and a DiT by its own regional compile of repeated blocks."""

from __future__ import annotations

import copy

import torch
from diffusers import DiTTransformer2DModel, UNet2DConditionModel

from tests.support.on_device import DEVICE, nothing_fell_back, same, settings


def test_a_unet_of_two_resolutions() -> None:
    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(8, 16), layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8, attention_head_dim=4, norm_num_groups=4,
    ).eval().to(DEVICE)  # fmt: skip
    compiled = torch.compile(model, **settings())
    with torch.no_grad():
        for side in (8, 16):
            x, words = torch.randn(2, 4, side, side, device=DEVICE), torch.randn(2, 3, 8, device=DEVICE)
            step = torch.tensor(7, device=DEVICE)
            same(compiled(x, step, words).sample, model(x, step, words).sample)
    assert nothing_fell_back()["generic_calls"] > 0


def test_repeated_blocks_of_a_dit() -> None:
    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10, norm_num_groups=4,
    ).eval().to(DEVICE)  # fmt: skip
    for parameter in model.parameters():  # its last layers begin with zeros
        torch.nn.init.normal_(parameter, std=0.2)
    twin = copy.deepcopy(model)
    model._repeated_blocks = model._repeated_blocks or ["BasicTransformerBlock"]
    model.compile_repeated_blocks(**settings())
    with torch.no_grad():
        for rows in (2, 3):
            x, kind = torch.randn(rows, 4, 8, 8, device=DEVICE), torch.arange(rows, device=DEVICE)
            step = torch.full((rows,), 5, device=DEVICE)
            got, wanted = (each(x, timestep=step, class_labels=kind).sample for each in (model, twin))
            same(got, wanted)
    assert nothing_fell_back()["generic_calls"] > 0
