"""Which options make two runs different. `train` needs it to continue a run, reports to group runs by seed."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mambacl.config import RunConfig

EXECUTION = ("out", "track", "device", "fast", "shard", "share_steps", "training.workers", "training.eval_batch_size")
"""where and how fast a run is computed; these do not affect what is computed"""
SEEDS = ("seed", "stream.order_seed")
"""runs of one experiment differ only in these"""


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Options by dotted name, as in {"training.lr": 0.001}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def defining(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options that identify a run."""
    return {key: value for key, value in flatten(config).items() if key not in EXECUTION}


def with_named_weights(config: RunConfig) -> RunConfig:
    """Replaces `pretrained: true` by the tag of the model's default weights, which may be others in another version of
    this package. A model without weights keeps it, and fails when it is built."""
    if config.pretrained is not True:
        return config
    from mambacl.backbones.registry import MODELS  # late, because it imports PyTorch

    return dataclasses.replace(config, pretrained=next(iter(MODELS.get(config.backbone).weights), True))


def differences(existing: RunConfig, wanted: RunConfig) -> list[str]:
    """Names of the options that make `wanted` another run than `existing`. The precision `auto` fits any run."""
    a, b = (defining(with_named_weights(config).as_dict()) for config in (existing, wanted))
    same = ("precision",) if wanted.precision == "auto" else ()
    return [key for key in {**a, **b} if a.get(key) != b.get(key) and key not in same]
