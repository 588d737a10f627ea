"""A vision-language model on pictures, questions and answers; its vision tower is frozen.

varuna run -n 3 examples/recipes/vision_language.py --model llava-1.5-7b-hf --data questions.jsonl
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

import varuna
from varuna.integrations.pretrained import config_of, records


class Questions:
    """Pictures, questions and answers; the loss counts answers."""

    def __init__(self, data: str, processor: Any, length: int) -> None:
        self.lines = records(data, "image", "question", "answer")
        self.folder, self.processor, self.length = Path(data).parent, processor, length

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        line = self.lines[index]
        image = {"type": "image", "path": str(self.folder / line["image"])}
        asked = [{"role": "user", "content": [image, {"type": "text", "text": line["question"]}]}]
        told = [*asked, {"role": "assistant", "content": [{"type": "text", "text": line["answer"]}]}]
        write = partial(self.processor.apply_chat_template, tokenize=True, return_dict=True, return_tensors="pt")
        begin = write(asked, add_generation_prompt=True)["input_ids"].shape[1]
        found = write(told, processor_kwargs={"padding": "max_length", "max_length": self.length})
        row = {name: value[0] for name, value in found.items()}
        spoken = (torch.arange(self.length) >= begin) & (row["attention_mask"] == 1)
        return row | {"labels": row["input_ids"].where(spoken, -100)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a vision-language model with a frozen tower.")
    parser.add_argument("--model", required=True, help="a folder of safetensors")
    parser.add_argument("--data", required=True, help="a file with image (a file), question and answer on each line")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--export", default="trained", help="the folder for the trained model")
    args = parser.parse_args(arguments)

    config_of(args.model, AutoModelForImageTextToText)  # refuses what is no such model
    processor = AutoProcessor.from_pretrained(args.model, padding_side="right")

    def build() -> Any:
        model = AutoModelForImageTextToText.from_pretrained(args.model, dtype=torch.float32)
        model.model.vision_tower.requires_grad_(False)
        return model

    trainer = varuna.Trainer(
        build,
        Questions(args.data, processor, args.length),
        lambda named: torch.optim.AdamW([each for _, each in named if each.requires_grad], lr=args.lr),
        args.global_batch,
        checkpoints=f"{args.export}-checkpoints",
    )
    for step in trainer.steps(args.steps):
        if step.is_main:
            print(f"step {step.index} loss {step.loss:.6f}")
    trainer.export(args.export)


if __name__ == "__main__":
    main()
