"""Whisper on recordings and what is said in them.

varuna run -n 3 examples/recipes/whisper.py --model whisper-large-v3 --data recordings.jsonl
"""

import argparse
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSpeechSeq2Seq, WhisperProcessor

import varuna
from varuna.integrations.pretrained import config_of, records


class Recordings:
    """WAV files of 16 bits in one channel, and their texts, as Whisper takes them."""

    def __init__(self, data: str, processor: Any, length: int) -> None:
        self.lines = records(data, "audio", "text")
        self.folder, self.processor, self.length = Path(data).parent, processor, length

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        line = self.lines[index]
        with wave.open(str(self.folder / line["audio"])) as file:
            sound = np.frombuffer(file.readframes(file.getnframes()), np.int16) / np.float32(32768)
            features = self.processor.feature_extractor(sound, sampling_rate=file.getframerate())
        words = self.processor.tokenizer(line["text"]).input_ids[: self.length]
        words = words[1:] if words[0] == self.processor.tokenizer.bos_token_id else words  # the model puts it before
        return {"input_features": features["input_features"][0], "labels": words + [-100] * (self.length - len(words))}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Fine-tune Whisper.")
    parser.add_argument("--model", required=True, help="a folder of safetensors")
    parser.add_argument("--data", required=True, help='a file with {"audio": "a.wav", "text": ...} on each line')
    parser.add_argument("--length", type=int, default=128, help="tokens of a text")
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--export", default="trained", help="the folder for the trained model")
    args = parser.parse_args(arguments)

    config = config_of(args.model, AutoModelForSpeechSeq2Seq)
    trainer = varuna.Trainer(
        lambda: AutoModelForSpeechSeq2Seq.from_config(config, dtype=torch.float32),
        Recordings(args.data, WhisperProcessor.from_pretrained(args.model), args.length),
        lambda named: torch.optim.AdamW([each for _, each in named if each.requires_grad], lr=args.lr),
        args.global_batch,
        weights=args.model,  # each worker reads what its stage needs
        checkpoints=f"{args.export}-checkpoints",
    )
    for step in trainer.steps(args.steps):
        if step.is_main:
            print(f"step {step.index} loss {step.loss:.6f}")
    trainer.export(args.export)


if __name__ == "__main__":
    main()
