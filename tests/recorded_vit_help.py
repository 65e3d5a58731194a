"""The small ViT of the recordings of APER and RanPAC, and their first task."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.methods import METHODS, Method, Setup, Task
from mambacl.training.optimizers import make_optimizer
from mambacl.training.recipe import Recipe

WIDTH, HEADS, DEPTH = 24, 4, 2
RECIPE = Recipe(optimizer="sgd", lr=0.05, head_lr=0.05, weight_decay=0.005, schedule="cosine", passes=3)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, eps=1e-6) for _ in range(2))
        self.attn, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class RecordedViT(nn.Module):
    """In float64, with the recording's weights."""

    num_features = WIDTH

    def __init__(self, recorded: dict[str, Tensor]) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.zeros(1, 10, WIDTH))
        for index in range(DEPTH):
            self.add_module(f"block{index}", Block())
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        weights = {name.removeprefix("backbone."): t for name, t in recorded.items() if name.startswith("backbone.")}
        self.load_state_dict({name: tensor for name, tensor in weights.items() if ".adapter." not in name})
        self.double()

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(images), -1, -1), patches), dim=1) + self.pos_embed
        for index in range(DEPTH):
            x = self.get_submodule(f"block{index}")(x)
        return self.norm(x)[:, 0]


def images_of(recorded: dict[str, Tensor], task: int) -> tuple[Tensor, Tensor]:
    return recorded[f"task{task}.images"].double(), recorded[f"task{task}.labels"]


@torch.no_grad()
def recorded_method(name: str, recorded: dict[str, Tensor], **options: object) -> Method:
    """At the start of the first task, with the recorded start values."""
    setup = Setup(options={"bottleneck": 4}, classifier_options=options)
    method = METHODS.get(name)(RecordedViT(recorded), setup)
    method.start_task(Task(0, classes=3, first_label=0, seed=0))
    method.heads.double()
    method.heads.heads[0].weight.copy_(recorded["init.head.weight"])
    for key, parameter in method.tuning.trained():
        _, _, block, layer, kind = key.split(".")
        parameter.copy_(recorded[f"backbone.block{block}.adapter.{layer}.{kind}"])
    return method


def first_task(method: Method, recorded: dict[str, Tensor]) -> list[Tensor]:
    """The losses of the recorded steps, by the loop's optimizer and schedule."""
    groups = [{"params": [p for _, p in named], "lr": RECIPE.lr} for named in method.named_parameters().values()]
    optimizer, losses = make_optimizer(RECIPE, groups), []
    for epoch in range(RECIPE.epochs):
        for group in optimizer.param_groups:
            group["lr"] = RECIPE.lr * RECIPE.lr_factor(epoch)
        loss, _ = method.loss(*images_of(recorded, 0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses
