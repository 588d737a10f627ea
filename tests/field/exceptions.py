"""What the rules get wrong in a family, and why."""

from collections.abc import Mapping
from typing import Any

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    # boxes are embedded in eighths of a quarter of the width
    "bros": {"hidden_size": 64, "intermediate_size": 64},
    # one class by default
    "patchtst": {"num_targets": 5},
    # heads of a state-space layer: expand * hidden_size / head_dim
    "mamba2": {"num_heads": 4},
    # lists with an entry per layer, in a form of their own
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    # a rotary share, or a count of devices, that must fit the heads
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8, "n_head": 4},
    # fields without which the class's own default cannot be built
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "longcat_flash": {"head_dim": 8},
    "esm": {"vocab_size": 40, "pad_token_id": 1, "mask_token_id": 32},
    # fields that a head needs and that are empty by default
    "hiera": {"decoder_hidden_size": 32, "decoder_depth": 2, "decoder_num_heads": 2},
    "sapiens2": {
        "head_config": {
            "upsample_out_channels": [16, 16],
            "upsample_kernel_sizes": [4, 4],
            "conv_out_channels": [16],
            "conv_kernel_sizes": [1],
        }
    },
    # embeddings in two parts that add up to the hidden size
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 4]},
}
"""Fields of configurations, by family."""

DENOISERS: Mapping[str, Mapping[str, Any]] = {
    # channels of the moment that the first block gets beside those of the sound
    "UNet1DModel": {"extra_in_channels": 64, "block_out_channels": (32, 32, 64)},
    # five numbers about the picture
    "UVit2DModel": {"micro_cond_embed_dim": 160},
    # widths by the side of a face
    "WanAnimateTransformer3DModel": {
        "inject_face_latents_blocks": 2,
        "motion_encoder_size": 32,
        "motion_encoder_channel_sizes": {str(2**power): 8 for power in range(2, 6)},
    },
    # widths of two texts, layers of which one is read, and three axes of positions
    "HiDreamImageTransformer2DModel": {
        "caption_channels": [32, 32],
        "llama_layers": list(range(8)),
        "max_resolution": (8, 8),
        "axes_dims_rope": (8, 4, 4),
    },
    # built by default without parts that every forward calls
    "HunyuanVideoFramepackTransformer3DModel": {"has_clean_x_embedder": True, "has_image_proj": True},
    # numbers of layers
    "WanVACETransformer3DModel": {"vace_layers": [0, 2]},
    "BriaFibo2Transformer2DModel": {"injection_layer_ids": (1, 3), "min_num_gist_tokens": 4, "max_num_gist_tokens": 8},
    # the first and the last layer of a block change its width
    "Kandinsky3UNet": {"layers_per_block": 3},
}
"""Arguments of constructors, by class."""
