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


def test_classifiers_on_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "python.md").read_text(encoding="utf-8").partition("## Classifiers on your own features")[2]
    code = re.findall(r"```python\n(.*?)```", text, re.S)[0]
    generator = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(3, 64, generator=generator)
    labels = torch.arange(60) % 3
    features = centres[labels] + torch.randn(60, 64, generator=generator)
    names = {"batches": [(features[:30], labels[:30])], "others": features[30:]}
    exec(code, {**names, "more_features": features[30:], "more_labels": labels[30:]}, names)
    assert torch.equal(names["predictions"], labels[30:]) and names["elsewhere"].statistics.counts.tolist() == [20] * 3
