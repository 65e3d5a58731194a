"""The documentation's code runs."""

import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[1] / "docs"


def test_the_loop_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"```python\n(.*?)```", (DOCS / "python.md").read_text(encoding="utf-8"), re.S)[0]
    torch.manual_seed(0)
    names = {"tasks": [(torch.randn(10, 3, 16, 16), torch.arange(10) % (2 + task)) for task in range(2)]}
    exec(code, names)
    assert names["logits"].shape == (10, 5) and (tmp_path / "space.safetensors").exists()
    assert names["space"].tasks == 2
