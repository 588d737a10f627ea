"""Jobs whose batches are no stacks of samples, and the same as plain eager loops."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import varuna
from varuna.data import sample_index

GLOBAL_BATCH, SIZE, STEPS = 8, 40, 4
WIDTH, VOCABULARY = 12, 32


class Samples:
    """Map-style samples, made by a function of the index and a generator that is seeded with it."""

    def __init__(self, make: Callable[[int, torch.Generator], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return self.make(index, torch.Generator().manual_seed(index))


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.2, momentum=0.9)


@dataclass(frozen=True)
class Job:
    """A job over Varuna, or as a plain loop."""

    model: Callable[[], nn.Module]
    samples: Samples
    collate: Callable[[list[Any]], Any] | None
    loss: Callable[[Any, Any], Tensor] | None = None
    positional: bool = False
    """the plain loop passes what collate returned as arguments"""
    micro_batch: int | None = None

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return self.model()

    def trainer(self) -> varuna.Trainer:
        return varuna.Trainer(
            self.build,
            self.samples,
            sgd,
            GLOBAL_BATCH,
            loss=self.loss,
            collate=self.collate,
            micro_batch=self.micro_batch,
        )

    def script(self) -> None:
        for _ in self.trainer().steps(STEPS):
            pass

    def plainly(self) -> list[float]:
        """The losses of a plain loop over whole batches."""
        model = self.build().train()
        optimizer, losses = sgd(list(model.named_parameters())), []
        collate = self.collate or torch.utils.data.default_collate
        for step in range(STEPS):
            positions = range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
            batch = collate([self.samples[sample_index(p, size=SIZE, seed=0)] for p in positions])
            output = model(*batch) if self.positional else model(**_taken(model, batch))
            loss = output if self.loss is None else self.loss(output, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses


def _taken(model: nn.Module, batch: Any) -> dict[str, Any]:
    names = model.forward.__code__.co_varnames[: model.forward.__code__.co_argcount]
    return {key: value for key, value in batch.items() if key in names}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.back(torch.tanh(self.wide(self.norm(x))))
        return found


# -- rows of packed tokens ------------------------------------------------------------------------------------


def sentence(index: int, draws: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(1, VOCABULARY, (3 + index % 6,), generator=draws)
    return {"ids": ids, "labels": ids.roll(-1)}


def flattened(samples: list[Any]) -> dict[str, Tensor]:
    """One row of all tokens; the first label of each sentence counts nothing, and positions begin again."""
    labels = [sample["labels"].clone() for sample in samples]
    for each in labels:
        each[0] = -100
    return {
        "ids": torch.cat([sample["ids"] for sample in samples])[None],
        "positions": torch.cat([torch.arange(len(sample["ids"])) for sample in samples])[None],
        "labels": torch.cat(labels)[None],
    }


class Packed(nn.Module):
    """Attention within sentences that lie in one row, told apart by their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.first, self.second = Block(), Block()
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        x = self.first(self.embed(ids) + self.place(positions))
        sentence = (positions == 0).cumsum(-1)
        seen = (sentence[:, :, None] == sentence[:, None, :]).tril()
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None], seen[:, None])[:, 0]
        return F.cross_entropy(self.head(self.second(x)).flatten(0, 1), labels.flatten())


class Summed(Packed):
    """The same, with a sum of losses that is divided by the number of tokens that count."""

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        x = self.second(self.first(self.embed(ids) + self.place(positions)))
        each = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="none")
        return each.sum() / (labels != -100).sum()


# -- graphs ---------------------------------------------------------------------------------------------------


def graph(index: int, draws: torch.Generator) -> dict[str, Tensor]:
    nodes = 2 + index % 4
    edges = torch.randint(0, nodes, (2, 3 + index % 5), generator=draws)
    x = torch.randn(nodes, 6, generator=draws)
    return {"x": x, "edges": edges, "y": (x.sum() > 0).long(), "node_y": (x[:, 0] > 0).long()}


def joined_graphs(samples: list[Any]) -> dict[str, Tensor]:
    counts = [len(sample["x"]) for sample in samples]
    offsets = [sum(counts[:number]) for number in range(len(counts))]
    return {
        "x": torch.cat([sample["x"] for sample in samples]),
        "edges": torch.cat([each["edges"] + offset for each, offset in zip(samples, offsets, strict=True)], dim=1),
        "batch": torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(counts)),
        "y": torch.stack([sample["y"] for sample in samples]),
        "node_y": torch.cat([sample["node_y"] for sample in samples]),
    }


class Messages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, WIDTH)
        self.rounds = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))
        self.head, self.node_head = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)

    def nodes(self, x: Tensor, edges: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x))
        for each in self.rounds:
            received = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
            x = torch.tanh(each(torch.cat([x, received], dim=-1)))
        return x


class OfGraphs(Messages):
    """A class for each graph."""

    def forward(self, x: Tensor, edges: Tensor, batch: Tensor, y: Tensor) -> Tensor:
        x = self.nodes(x, edges)
        count = y.shape[0]
        sums = x.new_zeros(count, x.shape[1]).index_add(0, batch, x)
        sizes = x.new_zeros(count).index_add(0, batch, torch.ones_like(batch, dtype=x.dtype))
        return F.cross_entropy(self.head(sums / sizes[:, None]), y)


class OfNodes(Messages):
    """A class for each node; logits, for loss=."""

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        found: Tensor = self.node_head(self.nodes(x, edges))
        return found


class OfBoth(Messages):
    """Two terms that count different things."""

    def forward(self, x: Tensor, edges: Tensor, batch: Tensor, y: Tensor, node_y: Tensor) -> Tensor:
        x = self.nodes(x, edges)
        pooled = x.new_zeros(y.shape[0], x.shape[1]).index_add(0, batch, x)
        return F.cross_entropy(self.head(pooled), y) + 0.5 * F.cross_entropy(self.node_head(x), node_y)


def loss_of_nodes(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output, batch["node_y"])


# -- boxes ----------------------------------------------------------------------------------------------------


def picture(index: int, draws: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
    count = 1 + index % 3
    image = torch.randn(3, 8, 8, generator=draws)
    boxes = torch.rand(count, 4, generator=draws)
    return image, {"boxes": boxes, "labels": torch.randint(0, 4, (count,), generator=draws)}


def joined_boxes(samples: list[Any]) -> dict[str, Tensor]:
    targets = [target for _, target in samples]
    counts = torch.tensor([len(target["labels"]) for target in targets])
    return {
        "images": torch.stack([image for image, _ in samples]),
        "boxes": torch.cat([target["boxes"] for target in targets]),
        "labels": torch.cat([target["labels"] for target in targets]),
        "image_of": torch.repeat_interleave(torch.arange(len(samples)), counts),
    }


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, WIDTH), nn.ReLU()
        )
        self.box, self.kind = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)


class OfJoined(Detector):
    def forward(self, images: Tensor, boxes: Tensor, labels: Tensor, image_of: Tensor) -> dict[str, Tensor]:
        found = self.body(images)[image_of]
        return {
            "loss_box": F.l1_loss(self.box(found), boxes, reduction="sum") / len(labels),
            "loss_kind": F.cross_entropy(self.kind(found), labels),
        }


class OfLists(Detector):
    """As torchvision's detectors: lists of images and of targets; a dict of losses."""

    def forward(self, images: Any, targets: Any) -> dict[str, Tensor]:
        found = self.body(torch.stack(images))
        box: Any
        kind: Any
        count = sum(len(target["labels"]) for target in targets)
        box = sum(
            F.l1_loss(self.box(each).expand(len(target["boxes"]), 4), target["boxes"], reduction="sum")
            for each, target in zip(found, targets, strict=True)
        )
        kind = sum(
            F.cross_entropy(self.kind(each).expand(len(target["labels"]), 4), target["labels"], reduction="sum")
            for each, target in zip(found, targets, strict=True)
        )
        return {"loss_box": box / count, "loss_kind": kind / count}


class OfBareLists(OfLists):
    def forward(self, images: Any, boxes: Any, labels: Any) -> dict[str, Tensor]:  # type: ignore[override]
        targets = [{"boxes": mine, "labels": its} for mine, its in zip(boxes, labels, strict=True)]
        return super().forward(images, targets)


class OfListedRows(Detector):
    """Lists of tensors of equal shapes, numbers among them."""

    def forward(self, images: Any, labels: Any) -> Tensor:
        return F.cross_entropy(self.kind(self.body(torch.stack(images))), torch.stack(labels))


def total(losses: dict[str, Tensor], batch: object) -> Tensor:
    return sum(losses.values(), torch.zeros(()))


def listed(samples: list[Any]) -> Any:
    return tuple(zip(*samples, strict=True))


def barely_listed(samples: list[Any]) -> Any:
    images, targets = zip(*samples, strict=True)
    return {"images": list(images), **{key: [target[key] for target in targets] for key in ("boxes", "labels")}}


def rows_listed(samples: list[Any]) -> Any:
    return {"images": [image for image, _ in samples], "labels": [target["labels"][0] for _, target in samples]}


# -- samples that are not there, and nests --------------------------------------------------------------------


def point(index: int, draws: torch.Generator) -> Any:
    x = torch.randn(6, generator=draws)
    return None if index % 5 == 2 else {"x": x, "y": (x.sum() > 0).long()}


def there(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate([sample for sample in samples if sample is not None])


class OfPoints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second, self.head = nn.Linear(6, WIDTH), Block(), Block(), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.second(self.first(self.embed(x))))
        return found


class Penalised(OfPoints):
    """Two terms, one of which does not depend on the samples."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(x), y) + 0.1 * self.head.weight.square().sum()


def loss_of_points(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output, batch["y"])


def nested(index: int, draws: torch.Generator) -> Any:
    x = torch.randn(6, generator=draws)
    return {
        "inputs": {"x": x, "meta": {"scale": torch.tensor(1.0 + index % 3)}},
        "views": [x * 2, x[:2]],
        "targets": ((x.sum() > 0).long(), {"weight": float(1 + index % 2)}),
    }


class OfNests(OfPoints):
    def forward(self, inputs: Any, views: Any) -> Tensor:  # type: ignore[override]
        one, two = views
        return super().forward(inputs["x"] * inputs["meta"]["scale"][:, None] + one + two.sum(-1, keepdim=True))


def loss_of_nests(output: Tensor, batch: Any) -> Tensor:
    labels, more = batch["targets"]
    found: Tensor = (F.cross_entropy(output, labels, reduction="none") * more["weight"]).mean()
    return found


JOBS = {
    "packed": Job(Packed, Samples(sentence), flattened),
    "packed and divided": Job(Summed, Samples(sentence), flattened),
    "graphs": Job(OfGraphs, Samples(graph), joined_graphs),
    "nodes": Job(OfNodes, Samples(graph), joined_graphs, loss_of_nodes),
    "graphs and nodes": Job(OfBoth, Samples(graph), joined_graphs),
    "boxes": Job(OfJoined, Samples(picture), joined_boxes, total),
    "lists": Job(OfLists, Samples(picture), listed, total, positional=True),
    "bare lists": Job(OfBareLists, Samples(picture), barely_listed, total, micro_batch=2),
    "lists of equal shapes": Job(OfListedRows, Samples(picture), rows_listed),
    "missing": Job(OfPoints, Samples(point), there, loss_of_points),
    "missing, two terms": Job(Penalised, Samples(point), there),
    "nests": Job(OfNests, Samples(nested), None, loss_of_nests),
}
