"""Files on the Hugging Face Hub, and its errors as sentences. Needs the extra `hub`.

A model has a file name that nobody else uses. Other files are never loaded: a checkpoint from elsewhere can run code
when it is unpickled. Imports PyTorch only to read a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

from mambacl.errors import UserError
from mambacl.log import logger
from mambacl.status import hidden

FILE = "mambacl.safetensors"
SCHEME = "hf://"
LOGIN = "run `hf auth login`, or set HF_TOKEN to a token of yours"
NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def downloaded(repo: str, revision: str | None = None) -> Path:
    """The model's file in the Hub's cache on this machine."""
    from mambacl.deploy.model_file import read_description

    hub("pull")
    check_name(repo)
    with hidden(), one_sentence(repo, "read", revision):  # the library has its own bar
        path = _newest_or_cached(repo, revision)
    read_description(path, f"{FILE} of {repo} is not a model that mambacl exported, and nothing of it was loaded.")
    return path


def _newest_or_cached(repo: str, revision: str | None) -> Path:
    """Without a network, the copy of an earlier download. The library alone would try for half a minute first."""
    from huggingface_hub import errors, hf_hub_url

    at = api()
    try:
        at.get_hf_file_metadata(url=hf_hub_url(repo, FILE, revision=revision, endpoint=at.endpoint))
    except Exception as error:
        if not _no_answer(error):
            raise
        try:
            path = at.hf_hub_download(repo, FILE, revision=revision, local_files_only=True)
        except errors.LocalEntryNotFoundError:
            raise error from None
        logger.info("The Hub cannot be reached: %s is the copy of an earlier download.", repo)
        return Path(path)
    return Path(at.hf_hub_download(repo, FILE, revision=revision))


def is_address(model: object) -> TypeGuard[str]:
    """Whether this is hf://OWNER/NAME or hf://OWNER/NAME@REVISION."""
    return isinstance(model, str) and model.startswith(SCHEME)


def check_address(address: str) -> str:
    """Refuses what cannot be the address of a model. Returns its NAME."""
    repo = address.removeprefix(SCHEME).partition("@")[0]
    check_name(repo)
    hub("pull")
    return repo.partition("/")[2]


def from_address(address: str) -> Path:
    """The model's file in the Hub's cache on this machine."""
    repo, _, revision = address.removeprefix(SCHEME).partition("@")
    return downloaded(repo, revision or None)


def refuse_address(run: object) -> None:
    """Refuses an address where a run folder is needed."""
    if is_address(run):
        raise UserError(
            f"{run} is an exported model, which lacks the sums that it needs to learn: give the run folder that it "
            "was pushed from."
        )


def hub(command: str) -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(f"`mambacl {command}` needs huggingface_hub: pip install 'mambacl[hub]'.") from None
    return huggingface_hub


def api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="mambacl")


def check_name(repo: str) -> None:
    if not NAME.fullmatch(repo):
        raise UserError(f"The repository must be OWNER/NAME, such as ada/flowers, got '{repo}'.")


@contextmanager
def one_sentence(repo: str, verb: str, revision: str | None = None) -> Iterator[None]:
    """The Hub's errors as sentences with a remedy. `verb`: what we do with the repository, read or write."""
    from huggingface_hub import errors

    try:
        yield
    except UserError:
        raise
    except errors.LocalEntryNotFoundError as error:
        raise UserError(_unreachable(error.__cause__ or error)) from None
    except errors.EntryNotFoundError:
        raise UserError(_without_model(repo, revision)) from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{repo} has no revision '{revision}': give a branch, a tag or a commit of it.") from None
    except errors.GatedRepoError:
        raise UserError(f"{repo} needs its owner's permission: ask for it on its page, then {LOGIN}.") from None
    except errors.RepositoryNotFoundError:
        words = "if it is private" if verb == "read" else "if it is yours"
        raise UserError(
            f"There is no repository {repo}, or you may not {verb} it: check the name; {words}, {LOGIN}."
        ) from None
    except errors.HFValidationError:
        raise UserError(f"The Hub does not allow the name '{repo}': use letters, digits, - _ and . in it.") from None
    except errors.HfHubHTTPError as error:
        raise UserError(_answered(error, repo, verb)) from None
    except Exception as error:
        if _no_answer(error):
            raise UserError(_unreachable(error)) from None
        raise


def _no_answer(error: Exception) -> bool:
    """Whether the network failed; libraries for HTTP have errors of different families."""
    from huggingface_hub import errors

    library = type(error).__module__.partition(".")[0]
    return not isinstance(error, errors.HfHubHTTPError) and (
        isinstance(error, OSError) or library in ("httpx", "httpx2", "requests")
    )


def _answered(error: Any, repo: str, verb: str) -> str:
    status = error.response.status_code if error.response is not None else None
    if status in (401, 403):
        return f"The Hub does not let you {verb} {repo}: {LOGIN}."
    words = " ".join(str(getattr(error, "server_message", None) or error).split())[:200].rstrip(".")
    return f"The Hub refused ({status}: {words}): try again later."


def _unreachable(error: BaseException) -> str:
    place = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    words = " ".join(str(error).split())[:120].rstrip(".") or type(error).__name__
    return f"The Hub at {place} cannot be reached ({words}): check the network, or HF_ENDPOINT and HF_HUB_OFFLINE."


def _without_model(repo: str, revision: str | None) -> str:
    try:
        others = sorted(api().list_repo_files(repo, revision=revision))
    except Exception:  # only to say more in the sentence
        others = []
    listed = f" (it has {', '.join(others[:5])}{' and others' if len(others) > 5 else ''})" if others else ""
    return (
        f"{repo} has no {FILE}{listed}, so it is no model that `mambacl push` uploaded; files of other kinds are never "
        "loaded."
    )
