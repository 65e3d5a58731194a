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
from mambacl.tuning.passes import BlockInput, Change, Tokens, check_length, run_blocks, with_attention
from mambacl.tuning.prompt_pool import PromptPool, pulled
from mambacl.tuning.query import frozen_query
from mambacl.tuning.token_prompts import place_of_prompts

VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {"pool": 10, "length": 10, "top_k": 4, "pull": 1.0, "low": 0.0, "high": 0.01},
    "public-code": {"pool": 10, "length": 5, "top_k": 5, "pull": 0.1, "low": -1.0, "high": 1.0},
    "coda": {"pool": 30, "length": 20, "top_k": 5, "pull": 1.0, "low": 0.0, "high": 1.0},
}


@dataclass(frozen=True)
class L2POptions(Options):
    """Options of L2P. What is null is the variant's."""

    variant: Literal["paper", "public-code", "coda"] = "paper"
    """paper: prompts stand before all other tokens, as in the authors' JAX code; public-code: behind the class token,
    with its position embedding, as in the PyTorch port that most comparisons use; coda: L2P++ of CODA-Prompt's code,
    with prefix prompts in block 0 and a pull term that compares each image with what all of a batch select"""
    pool: Annotated[int | None, at_least(1)] = None
    """prompts in the pool: 10, or 30 (coda)"""
    length: Annotated[int | None, at_least(1)] = None
    """tokens per prompt: 10 (paper), 5 (public-code), 20 (coda), there one half for keys and one for values"""
    top_k: Annotated[int | None, at_least(1)] = None
    """prompts per image: 4 (paper), 5 (public-code, coda)"""
    pull: Annotated[float | None, finite_from(0)] = None
    """weight of the cosines between queries and selected keys in the loss: 1 (paper, coda), 0.1 (public-code)"""
    by_majority: bool = False
    """use the prompts that most images of a batch select for all of them, in training and at test, as the published
    figures do; answers then depend on which images are asked about together"""
    head_on: Literal["auto", "prompts", "class"] = "auto"
    """what the head sees: the mean of the prompts' outputs or the class token; auto: prompts on a ViT; the class token
    on a Mamba backbone, where prompts stand in front and see no image, and with the variant coda"""

    def chosen(self, name: str) -> Any:
        given = getattr(self, name, None)
        return VARIANTS[self.variant][name] if given is None else given


class L2P(Method):
    name = "l2p"
    summary = "a pool of prompt tokens, selected by similarity (L2P)"
    options_class: ClassVar[type] = L2POptions

    def make_tuning(self) -> Tuning:
        options: L2POptions = self.options
        length, self.top_k, size = options.chosen("length"), options.chosen("top_k"), options.chosen("pool")
        if self.top_k > size:
            raise UserError(f"{self.name}: options.top_k ({self.top_k}) is more than options.pool ({size}): lower it.")
        self.count = length * self.top_k  # prompt tokens per image
        check_length(self.model, self.count, f"{self.name}: options.top_k times options.length")
        low, high = options.chosen("low"), options.chosen("high")
        self.pool = PromptPool(size, self.num_features, (length, self.num_features), self.setup.seed, low, high)
        self.on_vit, self.prefixes = isinstance(self.model, ViT), options.variant == "coda"
        if self.prefixes and length % 2:
            raise UserError(f"{self.name}: options.length must be even with the variant coda, got {length}.")
        if self.prefixes:
            self.attention_heads = with_attention(self.model, self.name).config.num_heads
        self.splits = not self.prefixes and not options.by_majority  # else images share prompts, or the term is a sum
        self.at = 0 if self.on_vit and options.variant == "paper" else place_of_prompts(self.model)
        by_default = self.on_vit and not self.prefixes
        self.reads_prompts = options.head_on == "prompts" or (options.head_on == "auto" and by_default)
        if self.reads_prompts and not by_default:
            raise UserError(
                f"{self.name}: options.head_on 'prompts' needs a vit backbone and another variant than coda: leave it "
                "at auto."
            )
        return AddedModules(self.model, pool=self.pool)

    def prompts_for(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The prompts (b, tokens, c) that queries select, their indices, and the cosines with all keys."""
        selected, similarity = self.pool.select(query, self.top_k, self.options.by_majority)
        prompts = self.pool.values[selected].flatten(1, 2)
        if self.on_vit and self.options.variant == "public-code":
            prompts = prompts + self.model.pos_embed[:, :1]  # type: ignore[index]
        return prompts, selected, similarity

    def prompted(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The feature (b, d), and the pull term."""
        prompts, selected, similarity = self.prompts_for(frozen_query(self.model, images))

        def change(block: BlockInput) -> Change | None:
            if block.index:
                return None
            if self.prefixes:  # the first halves of all selected prompts for keys, the second for values
                halves = prompts.unflatten(1, (self.top_k, 2, -1)).transpose(1, 2).flatten(2, 3)
                return Change(prefix=halves.unflatten(-1, (self.attention_heads, -1)))
            return Change(tokens=Tokens(prompts, self.at))

        output = run_blocks(self.model, images, change)
        feature = output.feature()
        if self.reads_prompts:
            assert isinstance(self.at, int)
            feature = output.norm(output.tokens[:, self.at : self.at + self.count]).mean(1)
        if self.prefixes:  # the selection of every image, for every image
            return feature, (similarity[:, selected] - 1).sum()
        return feature, pulled(similarity, selected)

    def features(self, images: Tensor) -> Tensor:
        return self.prompted(images)[0]

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        feature, pull = self.prompted(images)
        loss, correct = self.task_loss(feature, labels)
        return loss - self.options.chosen("pull") * pull, correct


METHODS.add(L2P.name, L2P)
