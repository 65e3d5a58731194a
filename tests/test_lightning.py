"""The callbacks for Lightning, with the real library."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from mambacl.backbones import create_model
from mambacl.classifiers import LDA
from mambacl.errors import UserError
from mambacl.nullspace import NullSpace

lightning = pytest.importorskip("lightning")
pytestmark = pytest.mark.extras

from mambacl.lightning import ClassifierCallback, NullSpaceCallback  # noqa: E402

WIDTH, CLASSES = 12, 3


class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
    """A linear layer in float64 and a fixed readout, trained by whatever `parameters_to_train` names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(WIDTH, 8, bias=False)).double()
        self.register_buffer("readout", torch.randn(8, CLASSES, dtype=torch.float64))
        self.train_these: list[nn.Parameter] = list(self.backbone.parameters())

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return F.cross_entropy(self.backbone(batch[0]) @ self.readout, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.train_these, lr=1e-2)


def tasks() -> list[TensorDataset]:
    """Inputs of the first task lie in four dimensions, so that a null space exists."""
    generator = torch.Generator().manual_seed(1)
    old = torch.randn(24, 4, generator=generator, dtype=torch.float64)
    old = old @ torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)
    new = torch.randn(24, WIDTH, generator=generator, dtype=torch.float64)
    return [TensorDataset(x, torch.arange(24) % CLASSES) for x in (old, new)]


def space_of(module: Module) -> NullSpace:
    return NullSpace(module.backbone, "exact", layers="all")


def trainer(folder: Path, *callbacks: object, epochs: int = 2) -> Any:
    return lightning.Trainer(
        max_epochs=epochs, callbacks=list(callbacks), default_root_dir=folder, accelerator="cpu", logger=False,
        enable_checkpointing=len(callbacks) > 1, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def test_old_outputs_stay_and_the_result_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    old, new = tasks()
    module, plain = Module(), Module()
    callback = NullSpaceCallback(space_of(module))
    before = None
    for task in (old, new):
        trainer(tmp_path, callback).fit(module, DataLoader(task, batch_size=8))
        if before is None:
            before, start = module.backbone(old.tensors[0]).detach(), module.backbone[0].weight.detach().clone()
    space = space_of(plain)
    for task in (old, new):
        optimizer = space.wrap(plain.configure_optimizers())
        for _ in range(2):
            for batch in DataLoader(task, batch_size=8):
                optimizer.zero_grad()
                plain.training_step(batch, 0).backward()
                optimizer.step()
        space.consolidate(DataLoader(task, batch_size=8))
    moved = (module.backbone[0].weight - start).norm()
    assert moved > 1e-2, "nothing was learned, so nothing is shown"
    change = (module.backbone(old.tensors[0]) - before).norm() / before.norm()
    assert change < 1e-10
    assert callback.space.tasks == 2 and torch.equal(module.backbone[0].weight, plain.backbone[0].weight)


def test_a_run_that_resumes_within_a_task_stays_protected(tmp_path: Path) -> None:
    old, new = tasks()
    module = Module()
    callback = NullSpaceCallback(space_of(module))
    trainer(tmp_path, callback).fit(module, DataLoader(old, batch_size=8))
    keep = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    trainer(tmp_path, callback, keep).fit(module, DataLoader(new, batch_size=8))
    other = Module()
    resumed, path = NullSpaceCallback(space_of(other)), str(tmp_path / "epoch=0.ckpt")
    trainer(tmp_path, resumed).fit(other, DataLoader(new, batch_size=8), ckpt_path=path)
    assert callback.space.tasks == resumed.space.tasks == 2
    assert torch.equal(module.backbone[0].weight, other.backbone[0].weight)
    for name, covariance in callback.space.covariances().items():
        assert torch.equal(covariance, resumed.space.covariances()[name])


def test_a_classifier_follows_the_tasks(tmp_path: Path) -> None:
    old, new = tasks()
    module, classifier = Module(), LDA(8)
    callback = ClassifierCallback(classifier, module.backbone)
    trainer(tmp_path, callback, epochs=1).fit(module, DataLoader(old, batch_size=8))
    assert classifier.classes == CLASSES
    expected = LDA(8)
    with torch.no_grad():
        expected.update(module.backbone(old.tensors[0]).float(), old.tensors[1])
        expected.finish_task()
        probe = module.backbone(new.tensors[0]).float()
    torch.testing.assert_close(classifier.scores(probe), expected.scores(probe))


def test_an_optimizer_without_protected_parameters_is_refused(tmp_path: Path) -> None:
    old, _ = tasks()
    module = Module()
    module.extra = nn.Linear(2, 2)
    module.train_these = list(module.extra.parameters())
    with pytest.raises(UserError, match=r"let configure_optimizers use space\.parameters"):
        trainer(tmp_path, NullSpaceCallback(space_of(module))).fit(module, DataLoader(old, batch_size=8))


def test_the_code_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[1] / "docs" / "integrations.md"
    code = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)[0]
    module = Module()
    module.backbone = create_model("defocus_mamba", **TINY)
    module.readout = torch.randn(module.backbone.num_features, CLASSES)
    module.train_these = [p for name, p in module.backbone.named_parameters() if name.endswith("x_proj.weight")]
    images = TensorDataset(torch.randn(8, 3, 16, 16), torch.arange(8) % CLASSES)
    names = {"module": module, "loaders": [DataLoader(images, batch_size=4)] * 2}
    exec(code.replace("max_epochs=5", "max_epochs=1, accelerator='cpu', logger=False"), names)
    assert names["space"].tasks == 2  # type: ignore[attr-defined]
