"""Shows a plan for several GPUs (`training.planning.record_of`): in the terminal, and as tables of a page."""

from collections.abc import Callable, Mapping
from typing import Any

from mambacl.errors import UserError
from mambacl.quantities import written
from mambacl.reports.rendering import pipe_table, to_text
from mambacl.reports.tables import Column, Table

Record = Mapping[str, Any]
NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "Adam's moments",
    "activations": "activations",
    "projection": "projection beyond activations",
    "projectors": "projectors",
    "covariances": "covariances",
    "gathering": "covariances of the task",
    "classifier": "classifier",
}
HOUR = 3600


def text(record: Record) -> str:
    """For the terminal."""
    tables = [gpus_table(record), memory_table(record)]
    if record["limit"] is not None:
        tables.append(switches_table(record))
    return "\n\n".join([heading(record), *map(to_text, tables), *advice(record), assumptions(record)])


def markdown(record: Record, name: str | None) -> str:
    """A table of a page: `gpus` (the default), `memory`, `switches` or `sizes`; `assumptions` is a line of text."""
    if name == "assumptions":
        return assumptions(record) + "\n"
    kinds: dict[str, Callable[[Record], Table]] = {
        "gpus": gpus_table, "memory": memory_table, "switches": switches_table, "sizes": sizes_table,
    }  # fmt: skip
    if (name or "gpus") not in kinds:
        raise UserError(f"A plan has no table '{name}'; known: {', '.join([*kinds, 'assumptions'])}.")
    table = kinds[name or "gpus"](record)
    rows = ([table.shown(cell) for cell in row] for row in table.rows)
    return pipe_table([column.title for column in table.columns], rows)


def heading(record: Record) -> str:
    job, sizes = record["job"], record["sizes"]
    counts = f"{_count(sizes['parameters'])} parameters, {_count(sizes['trained'])} of them train"
    where = f"{record['model']} at {record['pixels']} px in {record['precision']}"
    return f"{where}: {counts}; a batch of {job['batch']} images on all GPUs together"


def gpus_table(record: Record) -> Table:
    """One row per number of GPUs."""
    timed = bool(record["job"]["images"])
    titles = ["GPUs", "images each", "memory", "switched on", "step", "waiting", "projection", "images/s"]
    titles += ["sent per step", "task end", "sent then", *(["run"] if timed else [])]
    rows = []
    for plan in record["plans"]:
        step = plan["step"]
        row = [
            str(plan["gpus"]),
            str(plan["images_per_gpu"]),
            written(plan["memory"]["peak"]) + ("" if plan["fits"] in (None, True) else ", too much"),
            ", ".join(chosen_words(plan["chosen"])) or "nothing",
            written(step["total"], "s"),
            f"{step['waiting'] / step['total']:.0%}",
            f"{(step['projection'] + step['bringing']) / step['total']:.1%}",
            f"{plan['images_per_second']:,.0f}",
            written(plan["sent_per_step"]),
            written(plan["task_end"]["total"], "s"),
            written(plan["sent_per_task_end"]),
        ]
        rows.append((*row, f"{plan['run']['seconds'] / HOUR:,.1f} h") if timed else tuple(row))
    return Table("Per GPU", tuple(Column(title) for title in titles), tuple(rows))


def memory_table(record: Record) -> Table:
    """What needs the memory, in a step and when a task ends; a pair of columns per number of GPUs."""
    parts = dict.fromkeys(key for plan in record["plans"] for when in WHEN for key in plan["memory"][when])
    titles = ["", *(f"{_gpus(plan)}, {word}" for plan in record["plans"] for word in WHEN.values())]
    columns = [(plan["memory"][when], plan["memory"]["reserved"]) for plan in record["plans"] for when in WHEN]
    rows = [
        (NAMES[part], *(written(found[part]) if found.get(part) else "0" for found, _ in columns))
        for part in NAMES
        if part in parts and any(found.get(part) for found, _ in columns)
    ]
    rows.append(("libraries", *(written(reserved) for _, reserved in columns)))
    rows.append(("together", *(written(sum(found.values()) + reserved) for found, reserved in columns)))
    return Table("Memory per GPU", tuple(Column(title, text=not title) for title in titles), tuple(rows))


def _gpus(plan: Mapping[str, Any]) -> str:
    return "1 GPU" if plan["gpus"] == 1 else f"{plan['gpus']} GPUs"


WHEN = {"step": "step", "task_end": "task end"}


def switches_table(record: Record) -> Table:
    """What to switch on, one after the other, until the limit holds."""
    rows = [
        (str(plan["gpus"]), one["name"], written(one["peak"]), written(one["step"], "s"))
        for plan in record["plans"]
        for one in plan["switches"]
    ]
    titles = ("GPUs", "switched on, beside what stands above", "memory", "step")
    caption = "" if record["limit"] is None else f"To fit into {written(record['limit'])}"
    return Table(caption, tuple(Column(title, text=title == titles[1]) for title in titles), tuple(rows))


def sizes_table(record: Record) -> Table:
    """What the plan is computed from."""
    sizes = record["sizes"]
    matrices = ", ".join(f"{count} of {size} x {size}" for size, count in sizes["matrices"].items())
    covariances = sum(count * int(size) ** 2 for size, count in sizes["matrices"].items())
    rows = [
        ("parameters P", _count(sizes["parameters"])),
        ("that train T", _count(sizes["trained"] + sizes["head_trained"])),
        ("forward pass of an image", written(sizes["forward"], "FLOP")),
        ("backward pass of an image", written(sizes["backward"], "FLOP")),
        ("kept for it, per image", written(sizes["kept_image"])),
        ("kept with training.recompute", written(sizes["again_image"])),
        ("kept by the largest block", written(sizes["block_image"])),
        ("covariances", matrices or "none"),
        ("covariances of a task, float64", written(8 * covariances)),
        ("values of all bases", _count(sizes["basis_values"])),
        ("projection of a step", written(sizes["projection"], "FLOP")),
    ]
    return Table("Sizes", (Column("", text=True), Column("")), tuple(rows))


def advice(record: Record) -> list[str]:
    """What to do if a limit does not hold even with everything switched on."""
    found = [plan["gpus"] for plan in record["plans"] if plan["fits"] is False]
    if not found:
        return []
    return [f"Too large even so on {', '.join(map(str, found))} GPUs: use more, smaller images or a smaller batch."]


def chosen_words(chosen: Mapping[str, Any]) -> list[str]:
    words = [f"accumulate {chosen['accumulate']}"] if chosen["accumulate"] > 1 else []
    words += ["recompute"] if chosen["recompute"] else []
    words += [f"{name} {chosen[name]}" for name in ("covariances", "projectors") if chosen[name] != "device"]
    words += [f"storage {chosen['storage']}"] if chosen["storage"] not in ("float32", "float64") else []
    return words + [name for name in ("shard", "share_steps") if chosen[name]]


def assumptions(record: Record) -> str:
    machine = record["machine"]
    size = 2048
    speed, float32 = (written(machine[name], "FLOP/s") for name in ("speed", "float32"))
    return (
        f"Assumed of each GPU: {speed} in training, {float32} in the projection and in covariances, "
        f"{written(machine['cube'] * size**3, 's')} to decompose a matrix of "
        f"{size} x {size}, {written(machine['copies'], 'B/s')} in the optimizer; between GPUs "
        f"{written(machine['bandwidth'], 'B/s')} and {written(machine['latency'], 's')} per message, to CPU memory "
        f"{written(machine['host'], 'B/s')}; {written(machine['reserved'])} for libraries. Nothing is measured. How "
        "much of the exchange the passes hide is simulated, block by block and message by message."
    )


def _count(values: float) -> str:
    return written(values, "").rstrip()
