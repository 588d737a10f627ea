"""Packed documents train as they would one by one: nothing of a row reaches another document's tokens."""

import pytest
import torch

import varuna
from examples.packed_documents import LENGTH, Packed, adamw, build_model, pack, some_documents
from varuna.data.order import sample_index
from varuna.testing import run

STEPS, ROWS = 2, 4


@pytest.mark.nightly
def test_the_loss_of_packed_documents_is_that_of_each_alone() -> None:
    rows = pack(some_documents(24), LENGTH)
    packed = Packed(rows, LENGTH)

    def script() -> None:
        trainer = varuna.Trainer(build_model, packed, adamw, ROWS)
        for _ in trainer.steps(STEPS):
            pass

    torch.manual_seed(0)
    model = build_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    expected = []
    for step in range(STEPS):
        order = [sample_index(step * ROWS + place, size=len(rows), seed=0) for place in range(ROWS)]
        documents = [document[None] for index in order for document in rows[index]]
        targets = [document.numel() - 1 for document in documents]
        losses = [model(input_ids=document, labels=document).loss for document in documents]
        loss = sum(count * each for count, each in zip(targets, losses, strict=True)) / sum(targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    assert run(script, workers=2, stages=2).losses == pytest.approx(expected, rel=2e-5)


def test_rows_are_nearly_full() -> None:
    rows = pack(some_documents(400), LENGTH)
    tokens = sum(len(document) for row in rows for document in row)
    assert tokens / (len(rows) * LENGTH) > 0.9
    assert max(sum(map(len, row)) for row in rows) <= LENGTH
