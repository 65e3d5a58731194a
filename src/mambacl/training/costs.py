"""What a training step and the end of a task cost on several GPUs: bytes per GPU and seconds, by formula; how much of
the exchange the passes hide, by a simulation of a step, block by block and message by message.

Bytes, seconds and operations are plain numbers; N is the number of GPUs. Every GPU has its share of a batch. With
DDP it has all of the model, with FSDP2 a share of it. Nothing here measures anything: `training.planning` counts a
model's sizes, and `Machine` holds the assumed speeds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mambacl.nullspace.offload import STACK_BYTES

FLOAT32, FLOAT64 = 4, 8
ITEMS = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
MOMENTS = 2  # Adam's values per parameter
ADAM = 7 * FLOAT32  # bytes that a step of Adam moves per value: reads 4, writes 3
BUCKET = 25e6  # bytes per message of DDP
Parts = dict[str, float]  # by name


@dataclass(frozen=True)
class Machine:
    """Speeds of a GPU and of its connections. The defaults are those of an H200, as measured, and of a network of 400
    Gbit/s per GPU."""

    speed: float = 180e12
    """operations per second in training: De-focus-L in bf16 takes 242 ms for a step of 200 images, 44 TFLOP"""
    float32: float = 51e12
    """operations per second of the projection and of covariances, in full float32 and float64"""
    cube: float = 3.1e-12
    """seconds of a decomposition, per cube of the size: 27 ms for 2048"""
    copies: float = 3.4e12
    """bytes per second of an optimizer's step in the GPU's memory"""
    host: float = 25e9
    """bytes per second between CPU memory and GPU"""
    bandwidth: float = 50e9
    """bytes per second between GPUs, of each GPU's slowest link"""
    latency: float = 20e-6
    """seconds of a message between GPUs"""
    reserved: float = 1e9
    """bytes of the GPU that libraries and unused parts of PyTorch's blocks take"""


@dataclass(frozen=True)
class Sizes:
    """What is counted of a model, its null space and its classifier."""

    parameters: int
    """values of the backbone"""
    trained: int
    """those of them that train"""
    blocks: int
    """repeated blocks, which FSDP2 gathers one by one"""
    block: int
    """values of the largest"""
    head: int
    """values of the classifier, all classes"""
    head_trained: int
    """values of the current task's head"""
    forward: float
    """operations for one image"""
    backward: float
    kept_fixed: float
    """bytes that a forward pass keeps for the backward pass, without images, and per image"""
    kept_image: float
    again_fixed: float
    """the same with gradient checkpointing"""
    again_image: float
    block_fixed: float
    """the same of the block that keeps most"""
    block_image: float
    matrices: Mapping[int, int]
    """number of covariances by their size; without a null space none"""
    basis_values: int = 0
    """values of all bases"""
    projected: int = 0
    """values of the projected parameters"""
    projected_tensors: int = 0
    """their number"""
    projection: float = 0.0
    """operations of the projection"""
    snapshot: float = 0.0
    """bytes of a step beside the bases: parameters before it and temporaries"""
    gram: float = 0.0
    """operations of the covariances for one image"""
    held: int = 1
    """covariances that are kept of each feature: one for all tasks, or one per task"""

    @property
    def covariances(self) -> int:
        """Bytes of one task's covariances."""
        return FLOAT64 * sum(count * size * size for size, count in self.matrices.items())


@dataclass(frozen=True)
class Switches:
    """What saves memory."""

    accumulate: int = 1
    recompute: bool = False
    covariances: str = "device"
    projectors: str = "device"
    storage: str = "float32"
    shard: bool = False
    """FSDP2 in place of DDP"""
    share_steps: bool = False
    """each GPU projects a share of a step and sends it to the others"""


@dataclass(frozen=True)
class Load:
    """What is trained: the global batch, and where."""

    batch: int
    gpus: int
    covariance_batch: int = 100

    @property
    def own(self) -> int:
        """Images of one GPU, the largest share."""
        return -(-self.batch // self.gpus)

    def piece(self, switches: Switches) -> int:
        """Images that go through the model at once."""
        return -(-self.own // switches.accumulate)


# Bytes


def step_memory(sizes: Sizes, switches: Switches, load: Load) -> Parts:
    """Bytes per GPU at the peak of a step.

    Parameters 4 P; gradients 4 T and Adam's moments 8 T of the T values that train. FSDP2 divides these by N, and
    gathers two blocks: the one that runs and the next. Activations are what the forward pass keeps; a backward pass
    needs about a block's again for gradients or, with checkpointing, for what it computes again. The projection comes
    after it, when activations are gone: the larger of the two counts.
    """
    share = load.gpus if switches.shard else 1
    trained, piece = sizes.trained + sizes.head_trained, load.piece(switches)
    block = sizes.block_fixed + sizes.block_image * piece
    kept = sizes.kept_fixed + sizes.kept_image * piece
    if switches.recompute:
        kept = sizes.again_fixed + sizes.again_image * piece
    activations = kept + block
    return {
        "parameters": FLOAT32 * sizes.parameters / share + (2 * FLOAT32 * sizes.block if share > 1 else 0),
        "gradients": FLOAT32 * trained / share,
        "optimizer": MOMENTS * FLOAT32 * trained / share,
        "activations": activations,
        "projection": max(0.0, sizes.snapshot / share - activations),
        "projectors": projectors_on_gpu(sizes, switches),
        "covariances": float(sizes.covariances * sizes.held) if switches.covariances == "device" else 0.0,
        "classifier": float(FLOAT32 * sizes.head),
    }


def task_end_memory(sizes: Sizes, switches: Switches, load: Load) -> Parts:
    """Bytes per GPU while a task's covariances are gathered and decomposed: gradients and moments are gone, and blocks
    keep nothing; a new set of covariances and bases comes beside the old ones. GPUs take whole batches in turns."""
    before = step_memory(sizes, switches, load)
    images = load.covariance_batch
    return {
        "parameters": before["parameters"],
        "activations": (sizes.block_fixed + sizes.block_image * images) if sizes.matrices else 0.0,
        "gathering": float(sizes.covariances),
        "covariances": before["covariances"],
        "projectors": before["projectors"] + sizes.basis_values * ITEMS[switches.storage],
        "classifier": before["classifier"],
    }


def projectors_on_gpu(sizes: Sizes, switches: Switches) -> float:
    """All of them, or the two stacks that are under way."""
    total = sizes.basis_values * ITEMS[switches.storage]
    return float(total if switches.projectors == "device" else min(total, 2 * STACK_BYTES))


def peak(sizes: Sizes, switches: Switches, load: Load, machine: Machine) -> float:
    """Bytes per GPU that a run needs."""
    both = (sum(memory(sizes, switches, load).values()) for memory in (step_memory, task_end_memory))
    return machine.reserved + max(both)


# Seconds


def all_reduce(count: float, gpus: int, machine: Machine, messages: int = 1) -> float:
    """A ring sends 2 (N - 1) / N of the bytes from each GPU. Each message waits for 2 log2(N) steps."""
    steps = 2 * math.ceil(math.log2(gpus))
    return 2 * (gpus - 1) / gpus * count / machine.bandwidth + steps * messages * machine.latency


def all_gather(count: float, gpus: int, machine: Machine, messages: int = 1) -> float:
    """Half of an all-reduce; also that of a reduce-scatter. `count`: bytes of the whole."""
    return all_reduce(count, gpus, machine, messages) / 2


def waiting_with_ddp(backward: float, blocks: int, count: float, gpus: int, machine: Machine) -> float:
    """Seconds from the end of a backward pass to the end of the exchange of its gradients, `count` bytes. The pass goes
    through the blocks, and each leaves its share of the gradients at its end. A message goes when it has `BUCKET`
    bytes, or the last ones, and after the message before it."""
    link = 0.0
    for number in range(math.ceil(count / BUCKET)):
        full = min(count, (number + 1) * BUCKET)
        there = math.ceil(full / count * blocks * (1 - 1e-12)) / blocks * backward
        link = max(link, there) + all_reduce(full - number * BUCKET, gpus, machine)
    return max(0.0, link - backward)


def waiting_with_fsdp2(
    forward: float, backward: float, blocks: int, pieces: int, whole: float, trained: float, gpus: int, machine: Machine
) -> float:
    """Seconds that all pieces of a batch take longer than their passes, `forward` and `backward` seconds each. Both
    passes of a piece gather each block's parameters, `whole` bytes in all, while the block before runs; the backward
    pass scatters its gradients, `trained` bytes in all, when it is done. One message after the other."""
    gather, scatter = (all_gather(count / blocks, gpus, machine) for count in (whole, trained))
    clock = link = 0.0
    for _ in range(pieces):
        link = gathered = max(link, clock) + gather
        for number in range(2 * blocks):
            start = max(clock, gathered)
            if number + 1 < 2 * blocks:
                link = gathered = max(link, start) + gather
            clock = start + (forward if number < blocks else backward) / blocks
            if number >= blocks:
                link = max(link, clock) + scatter
    return max(clock, link) - pieces * (forward + backward)


def step_seconds(sizes: Sizes, switches: Switches, load: Load, machine: Machine) -> Parts:
    """Seconds of a step, which add up. `waiting` is what communication takes longer than the work that hides it.

    DDP sums the gradients, 4 T bytes, while the last piece's backward pass runs. FSDP2 gathers the parameters, 4 P
    bytes, for every forward and backward pass, and scatters the gradients. With DDP each GPU projects the whole step
    or, with `share_steps`, its share of the parameters and sends them to all others. With FSDP2 each projects its
    shard.
    """
    trained = FLOAT32 * (sizes.trained + sizes.head_trained)
    forward, backward = (load.own * flops / machine.speed for flops in (sizes.forward, sizes.backward))
    again = forward if switches.recompute else 0.0
    pieces, blocks, way = switches.accumulate, max(1, sizes.blocks), (load.gpus, machine)
    back = (again + backward) / pieces  # of a piece
    if switches.shard:
        whole = FLOAT32 * sizes.parameters
        waiting = waiting_with_fsdp2(forward / pieces, back, blocks, pieces, whole, trained, *way)
    else:
        waiting = waiting_with_ddp(back, blocks, trained, *way)
    projection = sizes.projection / machine.float32 / (load.gpus if switches.shard or switches.share_steps else 1)
    if switches.share_steps and not switches.shard:
        senders = min(load.gpus, sizes.projected_tensors)
        projection += all_gather(FLOAT32 * sizes.projected, load.gpus, machine, senders)
    brought = sizes.basis_values * ITEMS[switches.storage] / machine.host if switches.projectors != "device" else 0.0
    return {
        "forward": forward,
        "backward": backward,
        "recompute": again,
        "waiting": waiting,
        "optimizer": trained / FLOAT32 * ADAM / (load.gpus if switches.shard else 1) / machine.copies,
        "projection": projection,
        "bringing": max(0.0, brought - projection),
    }


def sent_bytes(sizes: Sizes, switches: Switches, load: Load) -> float:
    """Bytes that each GPU sends in a step: gradients, parameters with FSDP2, and projected values if they are shared
    out."""
    each, trained = (load.gpus - 1) / load.gpus, FLOAT32 * (sizes.trained + sizes.head_trained)
    if switches.shard:
        return switches.accumulate * each * (2 * FLOAT32 * sizes.parameters + trained)
    return each * (2 * trained + (FLOAT32 * sizes.projected if switches.share_steps else 0))


def task_end_seconds(sizes: Sizes, switches: Switches, load: Load, machine: Machine, images: float) -> Parts:
    """Seconds at the end of a task of so many images, which add up: a forward pass with covariances, shared by the
    GPUs; their sum over all GPUs in float64; the decomposition, matrix by matrix on all GPUs; the exchange of the
    bases."""
    if not sizes.matrices:
        return {}
    count = sum(sizes.matrices.values())
    moved = 2 * sizes.covariances / machine.host if switches.covariances != "device" else 0.0
    return {
        "covariances": images / load.gpus * (sizes.forward / machine.speed + sizes.gram / machine.float32),
        "sum": all_reduce(sizes.covariances, load.gpus, machine, count),
        "decomposition": sum(machine.cube * size**3 * -(-count // load.gpus) for size, count in sizes.matrices.items()),
        "bases": all_gather(sizes.basis_values * ITEMS[switches.storage], load.gpus, machine, min(load.gpus, count)),
        "moving": moved,
    }


def sent_at_task_end(sizes: Sizes, switches: Switches, load: Load) -> float:
    """Bytes that each GPU sends when a task ends."""
    each = (load.gpus - 1) / load.gpus
    return each * (2 * sizes.covariances + sizes.basis_values * ITEMS[switches.storage])
