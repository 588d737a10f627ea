"""Families beyond those that were promised: each found, or could have found, a mistake."""

import torch

from tests.unit.partition.families import (
    BART,
    GPT2,
    GROUPED,
    HIDDEN,
    IMAGES,
    MOE,
    QUIET_BERT,
    QUIET_GPT2,
    SPECIAL,
    T5,
    VOCABULARY,
    WIDE,
    Family,
    UNet,
    causal,
    generator_of,
    hugging_face,
    image,
    images,
    large_image,
    masked,
    masked_tokens,
    tokens,
    unet_loss,
)

QUIET_LAYERS = {
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}

MORE = {
    "stablelm": Family(causal("StableLm", **GROUPED)),
    "cohere": Family(causal("Cohere", **GROUPED)),
    "mpt": Family(causal("Mpt", vocab_size=VOCABULARY, d_model=32, n_heads=2, n_layers=3, max_seq_len=32)),
    "xglm": Family(
        causal(
            "XGLM",
            vocab_size=VOCABULARY,
            d_model=32,
            ffn_dim=48,
            num_layers=3,
            attention_heads=2,
            dropout=0.0,
            attention_dropout=0.0,
            layerdrop=0.0,
            max_position_embeddings=32,
        )
    ),
    "distilbert": Family(
        masked(
            "DistilBert",
            vocab_size=VOCABULARY,
            dim=32,
            n_layers=3,
            n_heads=2,
            hidden_dim=48,
            dropout=0.0,
            attention_dropout=0.0,
        )
    ),
    "deit": Family(images("DeiT", **WIDE, **QUIET_BERT, **IMAGES), image),
    "swin": Family(
        images(
            "Swin",
            image_size=32,
            patch_size=4,
            embed_dim=8,
            depths=[1, 1],
            num_heads=[2, 2],
            window_size=4,
            num_labels=5,
            drop_path_rate=0.0,
        ),
        lambda i: image(i, 32),
    ),
    "segformer": Family(
        images(
            "Segformer",
            hidden_sizes=[8, 16, 16, 32],
            depths=[1, 1, 1, 1],
            num_attention_heads=[1, 2, 2, 2],
            num_labels=5,
            drop_path_rate=0.0,
            hidden_dropout_prob=0.0,
        ),
        large_image,
    ),
    "regnet": Family(
        images(
            "RegNet", embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], groups_width=8, num_labels=5
        ),
        large_image,
        buffers=True,
    ),
    "efficientnet": Family(
        images(
            "EfficientNet",
            image_size=64,
            width_coefficient=0.25,
            depth_coefficient=0.3,
            hidden_dim=320,
            num_labels=5,
            dropout_rate=0.0,
            drop_connect_rate=0.0,
        ),
        large_image,
        buffers=True,
    ),
    "pegasus": Family(hugging_face("PegasusForConditionalGeneration", "PegasusConfig", **BART)),
    "gpt_bigcode": Family(causal("GPTBigCode", **GPT2, **QUIET_GPT2)),
    "rwkv": Family(
        causal(
            "Rwkv",
            vocab_size=VOCABULARY,
            hidden_size=32,
            attention_hidden_size=32,
            num_hidden_layers=3,
            context_length=32,
        )
    ),
    "jamba": Family(
        causal(
            "Jamba",
            **{**GROUPED, "num_hidden_layers": 4},
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=4,
            mamba_d_state=4,
            mamba_d_conv=2,
            mamba_dt_rank=4,
            use_mamba_kernels=False,
        )
    ),
    "granitemoe": Family(causal("GraniteMoe", **GROUPED, **MOE)),
    "deepseek_v3": Family(
        causal(
            "DeepseekV3",
            **{**GROUPED, "num_key_value_heads": 2},
            moe_intermediate_size=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            kv_lora_rank=8,
            q_lora_rank=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
            qk_nope_head_dim=8,
            first_k_dense_replace=1,
        )
    ),
    "gpt_oss": Family(causal("GptOss", **GROUPED, head_dim=16, **MOE)),
    "mamba2": Family(
        causal(
            "Mamba2",
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            state_size=4,
            num_heads=4,
            head_dim=8,
            n_groups=1,
            chunk_size=8,
        )
    ),
    "modernbert": Family(
        masked(
            "ModernBert",
            **{**WIDE, "max_position_embeddings": 32},
            attention_dropout=0.0,
            cls_token_id=0,
            sep_token_id=1,
        ),
        masked_tokens,
    ),
    "funnel": Family(
        masked(
            "Funnel",
            vocab_size=VOCABULARY,
            block_sizes=[1, 1],
            d_model=32,
            n_head=2,
            d_head=16,
            d_inner=48,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
        )
    ),
    "longt5": Family(
        hugging_face(
            "LongT5ForConditionalGeneration",
            "LongT5Config",
            vocab_size=VOCABULARY,
            decoder_start_token_id=0,
            pad_token_id=2,
            local_radius=4,
            **T5,
        ),
        masked_tokens,
    ),
    "mobilevit": Family(
        images(
            "MobileViT",
            image_size=64,
            hidden_sizes=[16, 24, 32],
            neck_hidden_sizes=[8, 8, 16, 16, 16, 32, 32],
            num_attention_heads=2,
            num_labels=5,
            hidden_dropout_prob=0.0,
            classifier_dropout_prob=0.0,
        ),
        large_image,
        buffers=True,
    ),
    "clip": Family(
        hugging_face(
            "CLIPModel",
            "CLIPConfig",
            text_config={**WIDE, "max_position_embeddings": 32, **SPECIAL},
            vision_config={**WIDE, **IMAGES},
            projection_dim=16,
        ),
        lambda i: {"input_ids": tokens(i)["input_ids"], "pixel_values": image(i)["pixel_values"]},
        loss=lambda output, batch: (output.text_embeds - output.image_embeds).square().mean(),
    ),
    "wav2vec2": Family(
        hugging_face(
            "Wav2Vec2ForSequenceClassification",
            "Wav2Vec2Config",
            **WIDE,
            conv_dim=[8, 8],
            conv_stride=[5, 2],
            conv_kernel=[10, 3],
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            feat_proj_dropout=0.0,
            final_dropout=0.0,
            layerdrop=0.0,
            mask_time_prob=0.0,
            apply_spec_augment=False,
            classifier_proj_size=8,
            num_labels=5,
        ),
        lambda i: {"input_values": torch.randn(400, generator=generator_of(i)), "labels": image(i)["labels"]},
    ),
    "llama_qa": Family(
        hugging_face("LlamaForQuestionAnswering", "LlamaConfig", **GROUPED, **SPECIAL),
        lambda i: {
            "input_ids": tokens(i)["input_ids"],
            "start_positions": torch.tensor(i % 7),
            "end_positions": torch.tensor(7 + i % 7),
        },
    ),
    "unet_bn": Family(lambda: UNet(batch_norm=True), image, loss=unet_loss, buffers=True),
    "minimax": Family(causal("MiniMax", **GROUPED, **MOE, head_dim=16, block_size=8)),
    "recurrent_gemma": Family(
        causal(
            "RecurrentGemma", **GROUPED, lru_width=32, attention_window_size=8, block_types=["recurrent", "attention"]
        )
    ),
    "phimoe": Family(causal("Phimoe", **GROUPED, **MOE, router_jitter_noise=0.0, input_jitter_noise=0.0)),
    "bamba": Family(
        causal(
            "Bamba",
            **{**GROUPED, "num_hidden_layers": 2},
            attn_layer_indices=[1],
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_d_state=4,
            mamba_n_groups=1,
            mamba_chunk_size=8,
            attn_rotary_emb=8,
        )
    ),
    "llama4": Family(
        hugging_face(
            "Llama4ForCausalLM",
            "Llama4TextConfig",
            **GROUPED,
            head_dim=16,
            num_local_experts=4,
            intermediate_size_mlp=48,
            **SPECIAL,
        )
    ),
    "vit_mae": Family(
        hugging_face(
            "ViTMAEForPreTraining",
            "ViTMAEConfig",
            **{
                **HIDDEN,
                "intermediate_size": 48,
                "image_size": 16,
                "patch_size": 4,
                "decoder_num_attention_heads": 2,
                "decoder_hidden_size": 32,
                "decoder_num_hidden_layers": 1,
                "decoder_intermediate_size": 48,
            },
            **QUIET_BERT,
        ),
        lambda i: {"pixel_values": image(i)["pixel_values"], "noise": torch.rand(16, generator=generator_of(i))},
    ),
    "segformer_seg": Family(
        hugging_face(
            "SegformerForSemanticSegmentation",
            "SegformerConfig",
            hidden_sizes=[8, 16, 16, 32],
            depths=[1, 1, 1, 1],
            num_attention_heads=[1, 2, 2, 2],
            decoder_hidden_size=16,
            num_labels=5,
            drop_path_rate=0.0,
            hidden_dropout_prob=0.0,
            classifier_dropout_prob=0.0,
        ),
        lambda i: {
            "pixel_values": image(i, 64)["pixel_values"],
            "labels": torch.randint(0, 5, (64, 64), generator=generator_of(i)),
        },
        buffers=True,
    ),
    "longformer": Family(
        masked("Longformer", **WIDE, **QUIET_BERT, max_position_embeddings=80, attention_window=8),
        masked_tokens,
        sections=12,
    ),
    "led": Family(
        hugging_face(
            "LEDForConditionalGeneration",
            "LEDConfig",
            **{**BART, **QUIET_LAYERS},
            max_encoder_position_embeddings=64,
            max_decoder_position_embeddings=64,
            attention_window=8,
        ),
        sections=12,
    ),
    "fsmt": Family(
        hugging_face(
            "FSMTForConditionalGeneration",
            "FSMTConfig",
            **{**{key: value for key, value in BART.items() if key != "vocab_size"}, **QUIET_LAYERS},
            src_vocab_size=VOCABULARY,
            tgt_vocab_size=VOCABULARY,
            langs=["en", "de"],
        )
    ),
    "switch": Family(
        hugging_face(
            "SwitchTransformersForConditionalGeneration",
            "SwitchTransformersConfig",
            **T5,
            vocab_size=VOCABULARY,
            decoder_start_token_id=0,
            pad_token_id=2,
            num_decoder_layers=2,
            num_experts=4,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            router_jitter_noise=0.0,
        )
    ),
    "nllb_moe": Family(
        hugging_face(
            "NllbMoeForConditionalGeneration",
            "NllbMoeConfig",
            **{**BART, **QUIET_LAYERS},
            num_experts=4,
            encoder_sparse_step=2,
            decoder_sparse_step=2,
            moe_token_dropout=0.0,
        )
    ),
    "longcat": Family(
        causal(
            "LongcatFlash",
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_layers=2,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=2,
            ffn_hidden_size=48,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            head_dim=8,
            v_head_dim=16,
            expert_ffn_hidden_size=16,
            moe_topk=2,
            n_routed_experts=4,
            zero_expert_num=2,
            max_position_embeddings=32,
        )
    ),
}
