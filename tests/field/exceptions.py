"""Exceptions from the rules: what they get wrong in a family, and why."""

from collections.abc import Mapping
from typing import Any

_EFFICIENT: Mapping[str, Any] = {
    "width_coefficient": 0.25,
    "depth_coefficient": 0.1,
    "out_channels": [16, 24, 40, 80, 112, 192, 320],
    "hidden_dim": 320,
}

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
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4},
    "zamba": {"attn_layer_period": 2, "attn_layer_offset": 0},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "lw_detr": {"projector_scale_factors": [1.0]},
    "oneformer": {"conv_dim": 32},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 1], [1, 2]],
        "spatial_target_layers": [0, 1, 2, 3],
        "downsample_rate": "1/2",
        "vision_config": {"hidden_size": 64},
    },
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "pp_doclayout_v2": {
        "class_thresholds": [0.5] * 20,
        "class_order": list(range(20)),
        "reading_order_config": {"max_2d_position_embeddings": 1024, "max_position_embeddings": 514},
    },
    "instructblip": {"image_token_index": 5},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "vitmatte": {"fusion_hidden_sizes": [64, 32, 16, 8]},
    # the smallest that the other library has
    "timm_wrapper": {"architecture": "test_resnet"},
    # widths that add up to the hidden size, or that are a share of it
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "lilt": {"hidden_size": 48},
    # the width after all layers, by the same share as theirs
    "efficientnet": _EFFICIENT,
    "align": {"vision_config": _EFFICIENT, "projection_dim": 80},
    # sizes that must be equal, or a product of others
    "depth_pro": {"patch_size": 32},
    "pix2struct": {"vision_config": {"patch_embed_hidden_size": 192, "patch_size": 8}},
    # channels of a stage of the backbone
    "pp_doclayout_v3": {"x4_feat_dim": 8},
    # special tokens that the model has by their numbers in BERT's vocabulary
    **{family: {"text_config": {"vocab_size": 2000}} for family in ("grounding-dino", "mm-grounding-dino")},
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
