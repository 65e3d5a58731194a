"""The consistency audit: against numbers by hand, through a space, and through a run and its report."""

import json

import pytest
import torch
from block_models import MODELS, build, output
from nullspace_help import images, set_random_gradients
from small_run import CONFIG

import mambacl
from mambacl.cli import main
from mambacl.errors import UserError
from mambacl.nullspace import NullSpace
from mambacl.nullspace.audit import QUANTITIES, drift, record, shares


@pytest.mark.parametrize("name", MODELS)
def test_nothing_has_moved_before_anything_is_trained(name):
    model, inputs, count = build(name)
    space = NullSpace(model)
    found = space.audit(inputs(0, 2), space.record(inputs(0, 2)))
    assert len(found) == count
    for quantities in found.values():
        assert quantities.keys() == QUANTITIES.keys() and set(quantities.values()) == {0.0}


@pytest.mark.parametrize("name", MODELS)
def test_each_quantity_moves_when_what_makes_it_moves(name):
    model, inputs, _ = build(name)
    space = NullSpace(model)
    first = space.selection.blocks[0].name
    moving = {"A": {"decay", "output"}, "out": {"output"}, "W_C": {"C", "output"}, "W_B": {"input", "output"}}
    for kind, expected in moving.items():
        noted = space.record(inputs(0, 2))
        with torch.no_grad():
            for block, part in space.selection.parts():
                if part.kind == kind and block.name == first:
                    part.of(model.get_parameter(part.parameter)).add_(0.1)
        found = space.audit(inputs(0, 2), noted)[first]
        assert {quantity for quantity, change in found.items() if change > 0} == expected, kind


def test_the_change_is_relative_to_the_norm():
    delta, A = torch.rand(1, 3, 4) + 0.1, torch.randn(4, 2)
    B, C, y = torch.randn(1, 3, 2), torch.randn(1, 3, 2), torch.randn(1, 3, 5)
    then = {"m/0/delta": delta, "m/0/A": A, "m/0/B": B, "m/0/C": C, "m/output": y}
    now = {**then, "m/0/delta": 1.1 * delta, "m/0/C": 3 * C, "m/output": 0.5 * y}
    found = drift(then, now)["m"]
    assert found["delta"] == pytest.approx(0.1, rel=1e-5) and found["input"] == pytest.approx(0.1, rel=1e-5)
    assert found["C"] == pytest.approx(2.0, rel=1e-5) and found["output"] == pytest.approx(0.5, rel=1e-5)
    decay = [torch.exp(-d[..., None] * A.exp()) for d in (delta, 1.1 * delta)]
    assert found["decay"] == pytest.approx(((decay[1] - decay[0]).norm() / decay[0].norm()).item(), rel=1e-4)


def test_a_record_of_another_model_is_refused(tiny_model):
    space = NullSpace(tiny_model())
    with pytest.raises(UserError, match="another model"):
        space.audit(images(2), NullSpace(tiny_model(depth=3)).record(images(2)))


def test_it_leaves_no_trace_in_the_model(tiny_model):
    model = tiny_model().train()
    before = output(model.eval(), images(2))
    model.train()
    record(model, NullSpace(model).selection.blocks, images(2))
    assert model.training
    torch.testing.assert_close(output(model.eval(), images(2)), before)


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_shares_before_and_after_the_projection(tiny_model, eta):
    model = tiny_model().double()
    space = NullSpace(model, eta=eta, rank="fraction:0.5")
    space.consolidate([images(dtype=torch.float64)])
    set_random_gradients(model, 0)
    space.wrap(torch.optim.SGD(space.parameters(), lr=0.1)).step()
    for row in space.update_energy().values():
        asked, applied = shares(row)
        assert 0.3 < asked < 0.7  # half of the directions, a random update
        free = 1 - asked
        let_through = (1 - eta) ** 2 * asked
        assert applied == pytest.approx(let_through / (let_through + free), rel=1e-6, abs=1e-12)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return mambacl.train(CONFIG, out=str(tmp_path_factory.mktemp("audit") / "run"), audit_images=3)


def test_a_run_keeps_images_and_audits_itself(run):
    audit = json.loads((run.folder / "audit.json").read_text())
    assert audit["after"] == 3 and [entry["task"] for entry in audit["tasks"]] == [0, 1, 2]
    assert all(entry["images"] == 3 for entry in audit["tasks"])
    first, last = (audit["tasks"][i]["drift"]["blocks.1.mixer"] for i in (0, -1))
    assert first["output"] > 0 and set(last.values()) == {0.0}
    assert [entry["task"] for entry in audit["updates"]] == [1, 2]  # nothing was protected in the first
    kinds = {part["kind"] for part in audit["updates"][0]["parts"]}
    assert kinds == {"W_delta", "W_B", "W_C", "A", "out"}


@pytest.mark.slow
def test_the_command_gives_the_same_again_and_shows_it(run, capsys):
    before = json.loads((run.folder / "audit.json").read_text())
    (run.folder / "audit.json").unlink()
    assert main(["audit", str(run.folder)]) == 0
    text = capsys.readouterr().out
    assert "exp(delta A)" in text and "Updates in protected directions" in text
    assert json.loads((run.folder / "audit.json").read_text()) == before
    page = (run.folder / "report.html").read_text()
    assert "Consistency audit" in page and (run.folder / "figures" / "audit-drift.png").exists()
    assert (run.folder / "figures" / "audit-updates.png").exists()
    assert main(["audit", str(run.folder), "--task", "2"]) == 0
    assert "blocks.1.mixer" in capsys.readouterr().out


def test_a_task_without_images_is_named(run, capsys):
    assert main(["audit", str(run.folder), "--task", "9"]) == 2
    assert "The run kept no images of task 9: it kept those of tasks 1, 2, 3." in capsys.readouterr().err


@pytest.mark.slow
def test_without_images_only_the_updates_are_audited(tmp_path, capsys):
    run = mambacl.train(CONFIG, out=str(tmp_path / "run"))
    audit = json.loads((run.folder / "audit.json").read_text())
    assert audit["tasks"] == [] and audit["updates"]
    assert not list((run.folder / "checkpoints").glob("audit-*"))
    assert main(["audit", str(run.folder)]) == 0
    assert "drift cannot be measured: train with --audit-images N" in capsys.readouterr().out
    assert "Consistency audit" in (run.folder / "report.html").read_text()


@pytest.mark.slow
def test_methods_without_a_null_space_are_audited_too(tmp_path, capsys):
    run = mambacl.train(CONFIG, out=str(tmp_path / "run"), method="sequential", audit_images=2)
    assert main(["audit", str(run.folder)]) == 0
    text = capsys.readouterr().out
    assert "No update was projected." in text and "exp(delta A)" in text


def test_a_run_without_a_finished_task_is_refused(tmp_path, capsys):
    assert main(["audit", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_a_damaged_record_is_noticed(run, tmp_path, capsys):
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(run.folder, folder)
    path = folder / "checkpoints" / "audit-00.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    assert main(["audit", str(folder)]) == 2
    assert "damaged" in capsys.readouterr().err


def test_hyphens_are_underscores_on_the_command_line(tmp_path, capsys):
    assert main(["train", "demo", "--audit-imagse", "3"]) == 2
    assert "Did you mean '--audit_images'?" in capsys.readouterr().err
    assert main(["train", "demo", "--audit-images", "-1", "--out", str(tmp_path / "run")]) == 2
    assert "audit_images must be at least 0" in capsys.readouterr().err
