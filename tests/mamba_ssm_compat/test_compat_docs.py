"""The code in docs/compat.md runs, each block in a Python of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "compat.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)


@pytest.mark.parametrize("block", BLOCKS, ids=[str(i) for i in range(len(BLOCKS))])
@pytest.mark.slow
def test_a_block_runs(block):
    if "transformers import" in block:
        pytest.importorskip("transformers")
    subprocess.run([sys.executable, "-c", block], check=True)


def test_every_name_in_the_table_is_there():
    from mambacl.mamba_ssm_compat.names import MODULES

    rows = re.findall(r"^\| (`(?:mamba_ssm|causal_conv1d|selective_scan_cuda).*?) \| (.*?) \|$", PAGE.read_text(), re.M)
    assert len(rows) == 8
    for names, contents in rows:
        first, *others = re.findall(r"`(.*?)`", names)
        modules = [first] + [
            first + name if name.startswith("_") else f"{first.rpartition('.')[0]}.{name}" for name in others
        ]
        there = {name for module in modules for name in MODULES[module]}
        functions = set(re.findall(r"`(\w+)`", contents)) - {"step", "allocate_inference_cache", "bimamba_type"}
        assert functions <= there, functions - there
