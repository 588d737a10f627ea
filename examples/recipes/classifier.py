"""A classifier of texts: a pretrained encoder with a new head, and what it gets right of texts that it has not seen.

varuna run -n 3 examples/recipes/classifier.py --model ModernBERT-large --data texts.jsonl --other others.jsonl
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

import varuna
from varuna.integrations.pretrained import config_of, records, tokenizer_of


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a classifier of texts.")
    parser.add_argument("--model", required=True, help="a folder of safetensors")
    parser.add_argument("--data", required=True, help='a file with {"text": ..., "label": ...} on each line')
    parser.add_argument("--other", required=True, help="the same, of texts that are not trained on")
    parser.add_argument("--length", type=int, default=256, help="tokens of a text")
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--export", default="trained", help="the folder for the trained model")
    args = parser.parse_args(arguments)

    tokenizer, lines = tokenizer_of(args.model), records(args.data, "text", "label")
    names = sorted({line["label"] for line in lines})

    def samples(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        texts = [line["text"] for line in lines]
        rows = tokenizer(texts, padding="max_length", truncation=True, max_length=args.length)
        columns = zip(rows["input_ids"], rows["attention_mask"], lines, strict=True)
        return [{"input_ids": i, "attention_mask": m, "labels": names.index(line["label"])} for i, m, line in columns]

    config = config_of(args.model, AutoModelForSequenceClassification)
    config.num_labels, config.problem_type = len(names), "single_label_classification"
    config.id2label, config.label2id = dict(enumerate(names)), {name: at for at, name in enumerate(names)}
    trainer = varuna.Trainer(
        lambda: AutoModelForSequenceClassification.from_config(config, dtype=torch.float32),
        samples(lines),
        lambda named: torch.optim.AdamW([each for _, each in named], lr=args.lr),
        args.global_batch,
        metrics=lambda output, batch: {"right": (output.logits.argmax(-1) == batch["labels"]).sum()},
        weights=varuna.Weights(args.model, missing="initialise"),  # the head is new
        checkpoints=f"{args.export}-checkpoints",
    )
    for step in trainer.steps(args.steps):
        if step.is_main:
            print(f"step {step.index} loss {step.loss:.6f}")
    found = trainer.evaluate(samples(records(args.other, "text", "label")))
    print(f"right: {found.metrics['right']:.0f} of {found.examples} others")
    trainer.export(args.export)


if __name__ == "__main__":
    main()
