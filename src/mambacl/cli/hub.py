"""Commands for the Hugging Face Hub: push, pull."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from mambacl.cli.deploy import Model, check_model
from mambacl.status import status

Repository = Annotated[str, "OWNER/NAME on the Hub"]


def push(
    run: Model,
    repository: Repository,
    *,
    private: Annotated[bool, "make a new repository private"] = False,
    tag: Annotated[str | None, "name this version, such as v2"] = None,
) -> None:
    """upload a model with a model card to the Hugging Face Hub: `mambacl push RUN ada/flowers --tag v1`

    Creates the repository if needed. The card has the class names, the results and the name of the data."""
    check_model(run)
    with status("preparing the model"):
        from mambacl.deploy.hub import push as push_model

        address = push_model(run, repository, private=private, tag=tag)
    print(address)


def pull(
    repository: Repository,
    *,
    revision: Annotated[str | None, "a branch, tag or commit; default: the newest"] = None,
    out: Annotated[Path | None, "file to write; default: NAME.safetensors in this folder"] = None,
) -> None:
    """download a model from the Hugging Face Hub: `mambacl pull ada/flowers --out flowers.safetensors`

    `mambacl predict`, `serve` and `mambacl.load` read the file. Only files that `mambacl push` wrote are loaded."""
    with status("downloading the model"):
        from mambacl.deploy.hub import pull as pull_model

        path = pull_model(repository, revision=revision, out=out)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
