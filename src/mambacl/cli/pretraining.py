"""The command pretrain: trains a backbone from random weights and exports it."""

from __future__ import annotations

from typing import Annotated, Any

from mambacl.lazy import loading_pytorch
from mambacl.log import logger
from mambacl.options import merge
from mambacl.pretraining.options import from_options


def pretrain(
    model: Annotated[str | None, "a backbone; `mambacl models` lists them (default defocus_mamba_nano)"] = None,
    *,
    overwrite: Annotated[bool, "start again if the folder already has a pre-training"] = False,
    skip_bad: Annotated[bool, "leave out images that cannot be read, and list them"] = False,
    **overrides: Any,
) -> None:
    """pre-train a backbone: `mambacl pretrain vim_mini --stream.root photos --minutes 30`

    Starts from random weights and writes half-precision weights and a model card. After an interruption, the same
    command continues."""
    if skip_bad:
        overrides = merge(overrides, {"stream": {"skip_bad": True}})
    if model is not None:
        overrides = {**overrides, "backbone": model}
    config = from_options(overrides)
    logger.info("Pre-training %s on %s, to %s", config.backbone, config.data_name, config.folder)
    with loading_pytorch():
        from mambacl.pretraining.api import pretrain as run
    made = run(overwrite=overwrite, **overrides)
    print(f"top-1: {made.accuracy['file']:.2%} (before rounding to half precision {made.accuracy['ema']:.2%}, "
          f"without averaging {made.accuracy['raw']:.2%})")  # fmt: skip
    print(f"Weights: {made.weights}")
