"""The consistency audit of a run: how far the model's outputs for images of earlier tasks have drifted.

With `audit_images`, `checkpoints/audit-NN.safetensors` holds images of a task and every block's output for them at the
end of the task. `audit.json` says how far these outputs have drifted since, and how much of each update fell into
protected directions.

Several processes do the same together, because the model can be cut among them. The first writes.
"""

from typing import Any

from torch import Tensor, nn

from mambacl import processes
from mambacl.errors import UserError
from mambacl.files import read_tensors, write_tensors
from mambacl.nullspace.audit import drift, record
from mambacl.nullspace.block_readers import find_blocks
from mambacl.training.folder import RunFolder, audit_file


def keep(folder: RunFolder, task: int, model: nn.Module, images: Tensor) -> None:
    """Saves some images of the task that has just ended, and the model's outputs for them."""
    outputs = {name: tensor.cpu() for name, tensor in record(model, find_blocks(model), images).items()}
    if processes.is_first():
        write_tensors(folder.checkpoints / audit_file(task), {"images": images.cpu(), **outputs}, {})


def audit(folder: RunFolder, model: nn.Module, tasks: int, moved: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Compares the model after `tasks` tasks with the saved outputs. Writes audit.json and returns it."""
    device, blocks = next(model.parameters()).device, find_blocks(model, layers=True)
    kept = []
    for task, path in folder.audit_files().items():
        if task >= tasks:
            continue
        then, _ = read_tensors(path)
        images = then.pop("images").to(device)
        now = {name: tensor.cpu() for name, tensor in record(model, blocks, images).items()}
        if now.keys() != then.keys():
            raise UserError(f"{path} does not belong to this run's model: undo any edits of config.yaml.")
        kept.append({"task": task, "images": len(images), "drift": drift(then, now)})
    roles = {part.name: {"block": block.name, "kind": part.kind} for block in blocks for part in block.parts}
    updates = []
    for task, rows in enumerate(moved):
        protected = [name for name in roles if name in rows and rows[name].any()]  # in the model's order
        parts = [{"part": name, **roles[name], "moved": rows[name].tolist()} for name in protected]
        updates.append({"task": task, "parts": parts})
    content = {"after": tasks, "tasks": kept, "updates": [row for row in updates if row["parts"]]}
    processes.decide(lambda: folder.write_audit(content))
    return folder.audit()
