"""Make a tiny model with random weights, and data, for each recipe: what its tests train on.

python examples/recipes/tiny.py sft tiny    writes tiny/model and tiny/chats.jsonl
"""

import argparse
import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('there is no role ' + m.role) }}{% endif %}<|{{ m.role }}|>"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = ["red", "green", "blue", "fast", "slow", "warm", "cold", "near", "far", "big", "small", "old", "new"]


def tokenizer() -> Any:
    """Make a tokenizer of bytes, and of the marks of the template."""
    marks = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<image>"]
    vocabulary = {each: at for at, each in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *marks])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(marks)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = TEMPLATE
    return fast


def say(seed: int, count: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[at] for at in torch.randint(len(WORDS), (count,), generator=generator).tolist())


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def causal(folder: Path, config: Any) -> None:
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")


def small(**more: Any) -> dict[str, Any]:
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    return {"vocab_size": 261, "max_position_embeddings": 256, "num_key_value_heads": 2, **shape, **more}


def chats(folder: Path) -> None:
    write(
        folder / "chats.jsonl",
        [
            {
                "messages": [
                    {"role": "user", "content": "repeat " + say(at, 1 + at % 3)},
                    {"role": "assistant", "content": say(at, 1 + at % 3)},
                ]
            }
            for at in range(96)
        ],
    )


def sft(folder: Path) -> None:
    causal(folder, transformers.LlamaConfig(**small()))
    chats(folder)


def full(folder: Path) -> None:
    causal(folder, transformers.Qwen3Config(**small(head_dim=16)))
    chats(folder)


def dpo(folder: Path) -> None:
    causal(folder, transformers.LlamaConfig(**small()))
    words = [{"prompt": "repeat " + say(at, 2), "chosen": say(at, 2), "rejected": say(at + 500, 2)} for at in range(64)]
    write(folder / "pairs.jsonl", words)


def moe(folder: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    causal(folder, transformers.Qwen3MoeConfig(**small(head_dim=16, **experts)))
    chats(folder)


def classifier(folder: Path) -> None:
    torch.manual_seed(1)
    config = transformers.ModernBertConfig(
        **small(), pad_token_id=256, bos_token_id=256, eos_token_id=256, cls_token_id=256, sep_token_id=256
    )
    transformers.AutoModelForMaskedLM.from_config(config).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    texts = [say(at, 4) for at in range(160)]
    lines = [{"text": text, "label": "warm" if "warm" in text or "red" in text else "other"} for text in texts]
    write(folder / "texts.jsonl", lines[:128])
    write(folder / "others.jsonl", lines[128:])


def whisper(folder: Path) -> None:
    torch.manual_seed(1)
    marks: dict[str, Any] = dict.fromkeys(
        ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 256
    )
    layers: dict[str, Any] = {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "d_model": 32,
    }
    heads: dict[str, Any] = {
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "num_mel_bins": 8,
        "vocab_size": 261,
    }
    sizes: dict[str, Any] = {"max_source_positions": 50, "max_target_positions": 64}
    config = transformers.WhisperConfig(**layers, **heads, **sizes, **marks)
    transformers.WhisperForConditionalGeneration(config).save_pretrained(folder / "model")
    listens = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    transformers.WhisperProcessor(listens, tokenizer()).save_pretrained(folder / "model")
    for at in range(32):
        tone = torch.sin(torch.arange(16000) * (at % 4 + 1) / 20) * 8000
        with wave.open(str(folder / f"{at}.wav"), "wb") as file:
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            file.writeframes(tone.to(torch.int16).numpy().tobytes())
    write(folder / "recordings.jsonl", [{"audio": f"{at}.wav", "text": WORDS[at % 4]} for at in range(32)])


def vision_language(folder: Path) -> None:
    torch.manual_seed(1)
    eye: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**eye, image_size=16, patch_size=8, projection_dim=32),
        text_config=transformers.LlamaConfig(**small()),
        image_token_index=260,
    )
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder / "model")
    sees = transformers.models.clip.image_processing_pil_clip.CLIPImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
    )
    how = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    words = tokenizer()
    transformers.LlavaProcessor(sees, words, chat_template=TEMPLATE, **how).save_pretrained(folder / "model")
    colours = {"red": (200, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 200)}
    for name, colour in colours.items():
        Image.new("RGB", (24, 20), colour).save(folder / f"{name}.png")
    lines = [{"image": f"{name}.png", "question": say(at, 2), "answer": name} for at in range(16) for name in colours]
    write(folder / "questions.jsonl", lines)


def denoiser(folder: Path) -> None:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(1)
    sizes = {"num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
    widths = {"in_channels": 16, "joint_attention_dim": 32, "pooled_projection_dim": 20, "axes_dims_rope": (4, 6, 6)}
    made: Any = FluxTransformer2DModel(**sizes, **widths, guidance_embeds=True)
    made.save_pretrained(folder / "model")
    (folder / "latents").mkdir(exist_ok=True)
    for at in range(32):
        latents = torch.full((4, *((8, 8) if at % 2 else (8, 12))), (at % 5 - 2) / 2)
        text = {"encoder_hidden_states": torch.randn(6, 32), "pooled_projections": torch.randn(20)}
        save_file({"latents": latents, **text}, folder / "latents" / f"{at:02}.safetensors")


MAKERS = (sft, full, dpo, moe, classifier, whisper, vision_language, denoiser)
KINDS: dict[str, Callable[[Path], None]] = {each.__name__: each for each in MAKERS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    KINDS[args.kind](args.folder)


if __name__ == "__main__":
    main()
