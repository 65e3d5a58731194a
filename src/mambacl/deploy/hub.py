"""Pushes models to the Hugging Face Hub, and pulls them. Needs the extra `hub`."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from mambacl.deploy.hub_files import FILE, LOGIN, api, check_name, downloaded, hub, one_sentence
from mambacl.deploy.loading import load
from mambacl.deploy.model_card import model_card
from mambacl.deploy.model_file import check_target
from mambacl.errors import UserError
from mambacl.files import expanded, make_folder, replacing, writing
from mambacl.status import hidden


def push(model: str | Path, repo: str, *, private: bool = False, tag: str | None = None) -> str:
    """Uploads a run's model, or an exported file, with a model card. Creates the repository OWNER/NAME if needed.
    Returns the address of the commit."""
    library = hub("push")
    check_name(repo)
    if library.get_token() is None:
        raise UserError(f"To push to the Hub, you need a token: {LOGIN}.")
    predictor = load(model, "cpu")
    with tempfile.TemporaryDirectory() as folder, hidden(), one_sentence(repo, "write"):  # the library has its own bar
        file = Path(folder) / FILE
        predictor.save(file)
        at = api()
        at.create_repo(repo, private=private or None, exist_ok=True)
        if tag is not None and any(ref.name == tag for ref in at.list_repo_refs(repo).tags):
            raise UserError(f"{repo} has the tag '{tag}' already: choose another.")
        card = model_card(repo, predictor.description, FILE).encode()
        adds = [library.CommitOperationAdd(FILE, str(file)), library.CommitOperationAdd("README.md", card)]
        words = f"{len(predictor.classes)} classes after task {predictor.description.card.get('tasks', '?')}"
        done = at.create_commit(repo, adds, commit_message=words)
        if tag is not None:
            at.create_tag(repo, tag=tag, revision=done.oid)
    return str(done.commit_url)


def pull(repo: str, *, revision: str | None = None, out: str | Path | None = None) -> Path:
    """Downloads a model that `push` uploaded, checks it, and writes it to a file that `mambacl.load` takes."""
    check_name(repo)
    path = Path(f"{repo.partition('/')[2]}.safetensors") if out is None else expanded(out)
    check_target(path)
    found = downloaded(repo, revision)
    make_folder(path.parent)
    with writing(path), replacing(path) as temporary:
        shutil.copyfile(found, temporary)
    return path
