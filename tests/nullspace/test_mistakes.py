"""Mistakes with a null space of one's own: one sentence each, and nothing changes."""

from pathlib import Path

import pytest
import torch
from nullspace_help import images
from torch import nn

import mambacl
from mambacl.backbones import create_model
from mambacl.errors import UserError


def test_what_is_no_batch(tiny_model) -> None:
    space = mambacl.NullSpace(tiny_model(), "exact")
    for wrong in (["abc"], [("abc", 3)], [3], [{"pixels": "abc"}], [[]], [images(2).numpy()]):
        with pytest.raises(UserError, match="A batch must be a tensor, a tuple that begins with one, or a mapping"):
            space.consolidate(wrong)
    with pytest.raises(UserError, match="consolidate needs batches, got int: pass a loader"):
        space.consolidate(3)  # type: ignore[arg-type]
    assert space.tasks == 0


def test_images_of_bytes(tiny_model) -> None:
    space = mambacl.NullSpace(tiny_model(), "exact")
    pixels = torch.zeros(2, 3, 16, 16, dtype=torch.uint8)
    with pytest.raises(UserError, match="needs images of floating-point numbers, got uint8: divide bytes by 255"):
        space.consolidate([pixels])
    foreign = nn.Sequential(nn.Conv2d(3, 4, 4), nn.Flatten(), nn.Linear(4 * 13 * 13, 2))
    with pytest.raises(UserError, match=r"The model refused a batch of bytes \(uint8\)"):
        mambacl.NullSpace(foreign, "exact", layers="all").consolidate([pixels])
    assert space.tasks == 0


@pytest.mark.parametrize("name", ["defocus_mamba_nano", "vim_nano", "vmamba_nano", "mambavision_nano"])
def test_every_backbone_refuses_bytes(name: str) -> None:
    with torch.device("meta"):
        model = create_model(name)
        with pytest.raises(UserError, match="needs images of floating-point numbers, got uint8"):
            model(torch.zeros(1, *model.default_cfg["input_size"], dtype=torch.uint8))


def test_a_space_is_saved_to_a_new_folder_but_not_as_a_folder(tiny_model, tmp_path: Path) -> None:
    space = mambacl.NullSpace(tiny_model(), "exact")
    space.consolidate([images(2)])
    space.save(tmp_path / "new" / "deep" / "space.safetensors")
    again = mambacl.NullSpace(tiny_model(), "exact")
    again.load(tmp_path / "new" / "deep" / "space.safetensors")
    assert again.tasks == 1
    with pytest.raises(UserError, match=r"new is a folder: name a file in it"):
        space.save(tmp_path / "new")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file is a file, but must be a folder"):
        space.save(tmp_path / "file" / "space.safetensors")
