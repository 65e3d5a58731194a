"""What the commands share in reading their arguments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from mambacl.errors import UserError
from mambacl.registry import did_you_mean

# As in mambacl.nullspace, which would load PyTorch for a word.
KINDS = ("W_delta", "W_B", "W_C", "A", "out", "W_dt", "linear", "conv")
MAPPINGS = (
    "--options.",
    "--backbone_options.",
    "--classifier_options.",
    "--stream.transforms.covariance.",
)  # of any names
GROUPS = ("nullspace", *(f"nullspace.{kind}" for kind in KINDS), "training", "stream", "stream.transforms")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].upper()}{message[1:]}. See `{self.prog} --help`.")


def with_underscores(arguments: Sequence[str], parser: Any) -> list[str]:
    """--audit-images is --audit_images: both are usual."""
    known = {option for action in parser._actions for option in action.option_strings}
    changed = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        other = "--" + name[2:].replace("-", "_")
        changed.append(
            other + equals + value if name.startswith("--") and name not in known and other in known else argument
        )
    return changed


def check_options(arguments: Sequence[str], parser: Any) -> None:
    """Names the option that is wrong, with the one that was perhaps meant."""
    known = [option for action in parser._actions for option in action.option_strings]
    for argument in arguments:
        name = argument.split("=")[0]
        if name.startswith("--") and name not in known and not name.startswith(MAPPINGS):
            last = name.lstrip("-").split(".")[-1]
            same = [option for option in known if option.split(".")[-1] == last]  # --lr is --training.lr
            hint = f" Did you mean '{same[0]}'?" if same else did_you_mean(name, known)
            raise UserError(f"There is no option '{name}'.{hint} See `mambacl train --help`.")
        if name.startswith("--") and name[2:] in GROUPS:
            raise UserError(f"The option '{name}' is a group: set {name}.NAME. See `mambacl train --help`.")
