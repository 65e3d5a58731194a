"""A run small enough for tests: a tiny backbone from random weights, three uneven tasks of the embedded images.

It is for tests of files, bits and messages. Its accuracy is close to chance whatever is done: `learning_run` has a run
that learns.

Run as a script it trains into the folder given. With a number of lines, seconds and a signal, it sends itself the
signal these seconds after metrics.jsonl has so many lines.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

CONFIG: dict[str, Any] = {
    "name": "small",
    "method": "mamba-cl",
    "backbone": "defocus_mamba",
    "pretrained": False,
    "backbone_options": {
        "img_size": 16,
        "patch_size": 4,
        "embed_dim": 32,
        "depth": 2,
        "use_aux_loss": False,
        "mamba": {"intermediate_size": 64, "state_size": 8, "time_step_rank": 4, "group_norm_size": 16},
    },
    "stream": {
        "tasks": [4, 3, 3],
        "order": "mamba-cl",
        "train_per_class": 8,
        "transforms": {"image_size": 16, "augment": "crop-flip"},
    },
    "nullspace": {"rank": "energy:0.9"},
    "training": {"passes": 3, "batch_size": 8, "lr": 5e-3, "head_lr": 5e-2, "decay_after": [2]},
}

VIT: dict[str, Any] = {  # in place of its backbone, for methods that change attention
    "backbone": "vit",
    "backbone_options": {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 6, "num_heads": 2},
}


OPTIONS: dict[str, dict[str, Any]] = {  # that methods need, or that make them small
    "lgcl": {"stand_in": "random"},
    "esn": {"length": 4},
    "mamba-fscil": {"states": 4, "rank": 3, "hidden": 16},
}


def backbone_for(method: str) -> dict[str, Any]:
    """What to change in the run for a method."""
    from mambacl.methods import METHODS

    own = {"options": OPTIONS[method]} if method in OPTIONS else {}
    return {**own, **({**VIT, "pretrained": False} if METHODS.get(method).needs_attention else {})}


def signal_after(events: Path, lines: int, seconds: float, name: str) -> None:
    while not events.exists() or events.read_bytes().count(b"\n") < lines:
        time.sleep(0.001)
    time.sleep(seconds)
    os.kill(os.getpid(), signal.Signals[name])


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("MAMBACL_TEST_THREADS", "1")))
    if len(sys.argv) > 2:
        when = (Path(sys.argv[1]) / "metrics.jsonl", int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
        threading.Thread(target=signal_after, args=when, daemon=True).start()
    import mambacl

    mambacl.train(CONFIG, out=sys.argv[1])
