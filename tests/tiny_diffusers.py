"""Random models of diffusers' architectures, small enough for any test: head_dim 8 everywhere."""

import diffusers
import torch

HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
MODELS = {
    "unet": lambda: diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(16, 16), layers_per_block=1, norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=12, attention_head_dim=2,
    ),
    "vae": lambda: diffusers.AutoencoderKL(
        block_out_channels=(8,), norm_num_groups=4, sample_size=8, latent_channels=2,
    ),
    "dit": lambda: diffusers.DiTTransformer2DModel(
        **HEADS, in_channels=4, num_layers=2, sample_size=8, num_embeds_ada_norm=10,
        norm_num_groups=4,
    ),
    "sd3": lambda: diffusers.SD3Transformer2DModel(
        **HEADS, sample_size=8, in_channels=4, num_layers=2, joint_attention_dim=12,
        caption_projection_dim=16, pooled_projection_dim=12, out_channels=4, pos_embed_max_size=8,
    ),
    "flux": lambda: diffusers.FluxTransformer2DModel(
        **HEADS, patch_size=1, in_channels=4, num_layers=1, num_single_layers=1,
        joint_attention_dim=12, pooled_projection_dim=12, axes_dims_rope=(2, 2, 4),
    ),
}
# Attention layers of each; the VAE has one in its encoder and one in its decoder.
CALLS = {"unet": 8, "vae": 2, "dit": 2, "sd3": 2, "flux": 2}


def tiny(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():   # some are made with zeros, and attention would not show
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def make_inputs(name):
    torch.manual_seed(1)
    image, text = torch.randn(2, 4, 8, 8), torch.randn(2, 5, 12)
    timestep = torch.tensor([1, 7])
    if name == "unet":
        mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
        return {"sample": image, "timestep": timestep, "encoder_hidden_states": text,
                "encoder_attention_mask": mask}
    if name == "vae":
        return {"sample": image[:, :3]}
    if name == "dit":
        return {"hidden_states": image, "timestep": timestep, "class_labels": timestep}
    joint = {"encoder_hidden_states": text, "pooled_projections": text[:, 0], "timestep": timestep}
    if name == "sd3":
        return {"hidden_states": image} | joint
    return {"hidden_states": image.flatten(2).transpose(1, 2), **joint,
            "img_ids": torch.arange(64.0)[:, None].expand(64, 3), "txt_ids": torch.zeros(5, 3)}


def run(model, name):
    return model(**{key: x.to(model.device) for key, x in make_inputs(name).items()}).sample
