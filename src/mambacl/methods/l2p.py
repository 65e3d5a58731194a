"""L2P, Learning to Prompt for Continual Learning (Wang et al., CVPR 2022): a query selects prompt tokens from a pool.

The query is the feature of the fixed model without prompts: two forward passes per image, in training and at test. The
prompts of the k nearest keys join the sequence, and the head sees the mean of what becomes of them.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from torch import Tensor

from mambacl.backbones.vit import ViT
from mambacl.errors import UserError
from mambacl.methods.base import Method
from mambacl.methods.registry import METHODS
from mambacl.options import Options, at_least, finite_from
from mambacl.tuning import AddedModules, Tuning
from mambacl.tuning.passes import BlockInput, Change, Tokens, check_length, run_blocks
from mambacl.tuning.prompt_pool import PromptPool, pulled
from mambacl.tuning.query import frozen_query
from mambacl.tuning.token_prompts import place_of_prompts

VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {"length": 10, "top_k": 4, "pull": 1.0, "low": 0.0, "high": 0.01},
    "public-code": {"length": 5, "top_k": 5, "pull": 0.1, "low": -1.0, "high": 1.0},
}


@dataclass(frozen=True)
class L2POptions(Options):
    """Options of L2P. What is null is the variant's."""

    variant: Literal["paper", "public-code"] = "paper"
    """paper: prompts stand before all other tokens, as in the authors' JAX code; public-code: behind the class token,
    with its position embedding, as in the PyTorch port that most comparisons use"""
    pool: Annotated[int, at_least(1)] = 10
    """prompts in the pool"""
    length: Annotated[int | None, at_least(1)] = None
    """tokens per prompt: 10 (paper), 5 (public-code)"""
    top_k: Annotated[int | None, at_least(1)] = None
    """prompts per image: 4 (paper), 5 (public-code)"""
    pull: Annotated[float | None, finite_from(0)] = None
    """weight of the cosines between queries and selected keys in the loss: 1 (paper), 0.1 (public-code)"""
    by_majority: bool = False
    """use the prompts that most images of a batch select for all of them, in training and at test, as the published
    figures do; answers then depend on which images are asked about together"""
    head_on: Literal["auto", "prompts", "class"] = "auto"
    """what the head sees: the mean of the prompts' outputs or the class token; auto: prompts on a ViT; the class token
    on a Mamba backbone, where prompts stand in front and see no image"""

    def chosen(self, name: str) -> Any:
        given = getattr(self, name, None)
        return VARIANTS[self.variant][name] if given is None else given


class L2P(Method):
    name = "l2p"
    summary = "a pool of prompt tokens, selected by similarity (L2P)"
    options_class: ClassVar[type] = L2POptions

    def make_tuning(self) -> Tuning:
        options: L2POptions = self.options
        length, self.top_k = options.chosen("length"), options.chosen("top_k")
        if self.top_k > options.pool:
            raise UserError(f"l2p: options.top_k ({self.top_k}) is more than options.pool ({options.pool}): lower it.")
        self.count = length * self.top_k  # prompt tokens per image
        check_length(self.model, self.count, "l2p: options.top_k times options.length")
        low, high = options.chosen("low"), options.chosen("high")
        self.pool = PromptPool(options.pool, self.num_features, (length, self.num_features), self.setup.seed, low, high)
        self.on_vit = isinstance(self.model, ViT)
        self.at = 0 if self.on_vit and options.variant == "paper" else place_of_prompts(self.model)
        self.reads_prompts = options.head_on == "prompts" or (options.head_on == "auto" and self.on_vit)
        if self.reads_prompts and not self.on_vit:
            raise UserError("l2p: options.head_on 'prompts' needs a vit backbone: leave it at auto.")
        return AddedModules(self.model, pool=self.pool)

    def prompted(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The feature (b, d), and the pull term."""
        selected, similarity = self.pool.select(frozen_query(self.model, images), self.top_k, self.options.by_majority)
        prompts = self.pool.values[selected].flatten(1, 2)  # (b, tokens, c)
        if self.on_vit and self.options.variant == "public-code":
            prompts = prompts + self.model.pos_embed[:, :1]  # type: ignore[index]

        def change(block: BlockInput) -> Change | None:
            return Change(tokens=Tokens(prompts, self.at)) if block.index == 0 else None

        output = run_blocks(self.model, images, change)
        feature = output.feature()
        if self.reads_prompts:
            assert isinstance(self.at, int)
            feature = output.norm(output.tokens[:, self.at : self.at + self.count]).mean(1)
        return feature, pulled(similarity, selected)

    def features(self, images: Tensor) -> Tensor:
        return self.prompted(images)[0]

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        feature, pull = self.prompted(images)
        loss, correct = self.task_loss(feature, labels)
        return loss - self.options.chosen("pull") * pull, correct


METHODS.add(L2P.name, L2P)
