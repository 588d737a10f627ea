"""The model of this example and its flags; nothing here knows Varuna."""

import logging
from argparse import ArgumentParser, Namespace

import torch
from text import VOCABULARY
from transformers import GPT2Config, GPT2LMHeadModel

# Each process would say that it takes the default loss, which is the one meant here.
logging.getLogger("transformers").setLevel(logging.ERROR)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags that train.py and reference.py share: what decides the numbers."""
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--length", type=int, default=128, help="tokens per sample")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)


def build_model(args: Namespace) -> torch.nn.Module:
    """Build an unmodified GPT-2 with random weights."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=args.length,
        n_embd=args.width,
        n_layer=args.layers,
        n_head=args.heads,
        resid_pdrop=args.dropout,
        embd_pdrop=args.dropout,
        attn_pdrop=args.dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)
