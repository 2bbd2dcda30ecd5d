"""Example models of the kinds the paper measures, each a module that ends in its training loss.

Every factory returns ``(module, inputs)``; ``module(*inputs)`` is a scalar loss. Factories take sizes, so that the same
code serves tests (tiny), examples and plans for models that fit no memory (wrap the call in ``FakeTensorMode``).

Batch-normalised and recurrent models take no ``dropout``; the others apply it where their papers do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["FACTORIES", "SMALL_SIZES", "gpt", "lstm", "mlp", "mlp_mixer", "small", "vgg16", "wide_resnet"]


class _Attention(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float):
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (batch, length, self.num_heads, width // self.num_heads)
        q, k, v = (layer(x).view(heads).transpose(1, 2) for layer in (self.query, self.key, self.value))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class _Block(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _Attention(width, num_heads, dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class _GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int, dropout: float, tied: bool):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def gpt(
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    vocabulary: int = 64,
    length: int = 8,
    batch: int = 4,
    dropout: float = 0.0,
    tied: bool = False,
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a decoder-only transformer language model and a batch of random tokens."""
    model = _GPT(layers, width, heads, vocabulary, length, dropout, tied)
    tokens, targets = (torch.randint(vocabulary, (batch, length)) for _ in range(2))
    return model, (tokens, torch.arange(length), targets)


class _Classifier(nn.Module):
    """A network followed by the cross-entropy of its outputs."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.network(x), targets)


def mlp(
    width: int = 16, hidden: int = 64, classes: int = 8, batch: int = 8, dropout: float = 0.0
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a classifier of two fully connected layers."""
    layers = [nn.Linear(width, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, classes)]
    return _Classifier(nn.Sequential(*layers)), (torch.randn(batch, width), torch.randint(classes, (batch,)))


_VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)


def vgg16(
    image: int = 224, classes: int = 1000, batch: int = 32, shrink: int = 1, hidden: int = 4096, dropout: float = 0.0
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return VGG16; ``shrink`` divides the number of channels of every convolution."""
    layers: list[nn.Module] = []
    channels = 3
    for out in _VGG16:
        if out == 0:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(channels, out // shrink, 3, padding=1), nn.ReLU()]
        channels = out // shrink
    layers += [nn.Flatten(), nn.Linear(channels * (image // 32) ** 2, hidden), nn.ReLU(), nn.Dropout(dropout)]
    layers += [nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, classes)]
    inputs = torch.randn(batch, 3, image, image), torch.randint(classes, (batch,))
    return _Classifier(nn.Sequential(*layers)), inputs


class _Bottleneck(nn.Module):
    def __init__(self, channels: int, inner: int, out: int, stride: int):
        super().__init__()
        self.narrow = nn.Sequential(nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU())
        spatial = nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)
        self.spatial = nn.Sequential(spatial, nn.BatchNorm2d(inner), nn.ReLU())
        self.widen = nn.Sequential(nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out))
        self.shortcut: nn.Module = nn.Identity()
        if channels != out or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.widen(self.spatial(self.narrow(x))) + self.shortcut(x))


def wide_resnet(
    depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, widen: int = 2, image: int = 224, classes: int = 1000,
    batch: int = 32,
) -> tuple[nn.Module, tuple[Tensor, ...]]:  # fmt: skip
    """Return a wide residual network; the defaults give WideResNet-50-2."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, padding=1))
    channels = width
    for stage, depth in enumerate(depths):
        out = 4 * width * 2**stage
        for position in range(depth):
            stride = 2 if stage > 0 and position == 0 else 1
            layers.append(_Bottleneck(channels, widen * width * 2**stage, out, stride))
            channels = out
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    inputs = torch.randn(batch, 3, image, image), torch.randint(classes, (batch,))
    return _Classifier(nn.Sequential(*layers)), inputs


class _LSTM(nn.Module):
    """A language model of LSTM layers written out step by step, so that every step can be planned."""

    def __init__(self, layers: int, width: int, vocabulary: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.inputs = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.states = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for from_input, from_state in zip(self.inputs, self.states, strict=True):
            outputs: list[Tensor] = []
            # Gates lie innermost: a shard of the units then holds all four gates of its units.
            drives = from_input(x).unflatten(-1, (-1, 4)).unbind(1)
            cell: Tensor | None = None
            for drive in drives:
                if outputs:
                    drive = drive + from_state(outputs[-1]).unflatten(-1, (-1, 4))
                update, keep, expose, new = drive.unbind(-1)
                kept = torch.sigmoid(update) * torch.tanh(new)
                cell = kept if cell is None else torch.sigmoid(keep) * cell + kept
                outputs.append(torch.sigmoid(expose) * torch.tanh(cell))
            x = torch.stack(outputs, 1)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def lstm(
    layers: int = 1, width: int = 16, vocabulary: int = 32, length: int = 3, batch: int = 4
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a recurrent language model and a batch of random tokens."""
    tokens, targets = (torch.randint(vocabulary, (batch, length)) for _ in range(2))
    return _LSTM(layers, width, vocabulary), (tokens, targets)


class _MixerBlock(nn.Module):
    def __init__(self, patches: int, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class _Mixer(nn.Module):
    def __init__(self, blocks: int, width: int, image: int, patch: int, classes: int):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.blocks = nn.Sequential(*(_MixerBlock((image // patch) ** 2, width) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(tokens)).mean(1))


def mlp_mixer(
    blocks: int = 8, width: int = 512, image: int = 224, patch: int = 32, classes: int = 1000, batch: int = 32
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return an MLP-Mixer; the defaults give S/32 with 49 patches."""
    inputs = torch.randn(batch, 3, image, image), torch.randint(classes, (batch,))
    return _Classifier(_Mixer(blocks, width, image, patch, classes)), inputs


FACTORIES = {"gpt": gpt, "lstm": lstm, "mlp": mlp, "mlp_mixer": mlp_mixer, "vgg16": vgg16, "wide_resnet": wide_resnet}

# Sizes at which every operator of a model still occurs and a step takes milliseconds; dropout where the model has it.
SMALL_SIZES: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 1, "width": 16, "vocabulary": 32, "dropout": 0.1, "tied": True},
    "lstm": {},
    "mlp": {"dropout": 0.2},
    "mlp_mixer": {"blocks": 1, "width": 16, "image": 16, "patch": 4, "batch": 4, "classes": 8},
    "vgg16": {"image": 32, "shrink": 16, "hidden": 32, "classes": 8, "batch": 8, "dropout": 0.5},
    "wide_resnet": {"depths": (1, 1), "width": 4, "image": 16, "batch": 4, "classes": 8},
}


def small(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return one of the models at :data:`SMALL_SIZES` and its batch, the same wherever it is called.

    >>> model, batch = small("mlp")
    >>> model(*batch).dtype
    torch.float64
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, batch = FACTORIES[name](**SMALL_SIZES[name])
    return model.to(dtype), tuple(x.to(dtype) if x.is_floating_point() else x for x in batch)
