"""Fine-tuning as transformers' examples do it; with ``--here`` over Varuna, where one worker kills itself once."""

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments


def build() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=2,
            n_embd=16,
            n_head=2,
            vocab_size=32,
            n_positions=12,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


class Sentences:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 32, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens.clone()}


class Dies(TrainerCallback):
    """Kills a worker that is not the main one, in the middle of the run."""

    def __init__(self, folder: Path, at: int) -> None:
        self.folder, self.at = folder, at

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Once in a run: whoever makes the file first is the one."""
        if state.global_step != self.at or state.is_world_process_zero:
            return
        try:
            (self.folder / "killed").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def right(found: Any) -> dict[str, float]:
    return {"accuracy": float((found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]).mean())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--here", action="store_true")
    told = parser.parse_args()
    kind: Any = transformers.Trainer
    if told.here:
        from varuna.integrations.transformers import Trainer

        kind = Trainer
    args = TrainingArguments(
        output_dir=str(told.folder / ("here" if told.here else "there")),
        max_steps=24,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=12,
        save_strategy="no",
        disable_tqdm=True,
        report_to="none",
        use_cpu=True,
    )
    torch.manual_seed(3)
    model: nn.Module = build()
    trainer = kind(
        model,
        args,
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        compute_metrics=right,
        callbacks=[Dies(told.folder, 9)] if told.here else [],
    )
    trainer.train()
    if trainer.is_world_process_zero():
        trainer.state.save_to_json(str(told.folder / f"{'here' if told.here else 'there'}.json"))


if __name__ == "__main__":
    main()
