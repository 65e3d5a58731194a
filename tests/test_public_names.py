"""The names at the top of the package, and what importing it does not do."""

import json
import subprocess
import sys

import pytest

import mambacl


def test_every_name_is_there() -> None:
    assert set(dir(mambacl)) == set(mambacl.__all__)
    for name in mambacl.__all__:
        assert getattr(mambacl, name) is not None, name
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        mambacl.trian  # noqa: B018


def test_what_there_is_can_be_listed() -> None:
    assert {"mamba-cl", "sequential", "frozen", "seq-adapter", "ease"} <= set(mambacl.list_methods())
    assert {"separate", "cosine", "nearest-mean"} <= set(mambacl.list_classifiers())
    assert {"fashion-mnist-small", "folders", "cifar100"} <= set(mambacl.list_datasets())
    assert "defocus_mamba_nano" in mambacl.list_models()


def test_a_model_is_used_by_names_at_the_top() -> None:
    assert mambacl.load.__module__ == "mambacl.deploy.loading" and hasattr(mambacl.Predictor, "predict")
    assert mambacl.compare.__module__ == "mambacl.deploy.comparing" and hasattr(mambacl.Comparison, "broken")


def test_importing_changes_nothing_in_the_program() -> None:
    """Neither PyTorch nor timm is loaded, no log handler and no import hook installed; nor by what needs no PyTorch."""
    code = """
import json, logging, sys
hooks = list(sys.meta_path)
import mambacl
mambacl.list_methods(), mambacl.list_classifiers(), mambacl.__version__, mambacl.RunConfig, mambacl.Setting
import mambacl.log
handlers = logging.getLogger("mambacl").handlers + logging.getLogger().handlers
loaded = [name for name in ("torch", "timm", "mambacl.timm") if name in sys.modules]
print(json.dumps([sys.meta_path == hooks, len(handlers), loaded]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [True, 0, []]


@pytest.mark.parametrize(
    "setup, shown",
    [
        ("", "plain"),
        ("logging.basicConfig(format='log: %(message)s')", "log: plain"),
        ("logging.getLogger('mambacl').setLevel('WARNING')", ""),
    ],
)
def test_messages_go_where_the_program_sends_its_log_or_to_standard_error(setup: str, shown: str) -> None:
    code = f"import logging\n{setup}\nfrom mambacl.log import logger\nlogger.info('%s', 'plain')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == shown and not done.stdout
