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
