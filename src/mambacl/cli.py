"""The command line. A mistake of the user's gets one sentence and exit code 2; a failure in the middle of work 1."""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mambacl.errors import UserError
from mambacl.registry import did_you_mean

if TYPE_CHECKING:
    from mambacl.training.run import Run


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].upper()}{message[1:]}. See `{self.prog} --help`.")


def train(arguments: Sequence[str]) -> int:
    """train a preset or file: `mambacl train demo --method sequential --training.lr 1e-3`"""
    from jsonargparse import ArgumentError

    from mambacl.config import build_parser, preset_names, readable, resolve
    from mambacl.methods import METHODS
    from mambacl.training.run import train as run_training

    parser = build_parser()
    parser.usage = (
        "mambacl train [PRESET or FILE] [--compare METHOD[,METHOD]] [--overwrite] [--skip-bad] [--key value ...]"
    )
    parser.add_argument("preset", nargs="?", help=f"a preset ({', '.join(preset_names())}) or the path of a YAML file")
    parser.add_argument("--compare", default=None, help="further methods, with commas, to train on the same stream")
    parser.add_argument("--overwrite", action="store_true", help="train anew where the run folder holds a run already")
    words = "leave out images that cannot be read, and say which: --stream.skip_bad true"
    parser.add_argument("--skip-bad", action="store_true", help=words)
    if "-h" in arguments or "--help" in arguments:
        print(re.sub(r"\n  --\S+ CONFIG\s+Path to a configuration file\.", "", parser.format_help()))
        return 0
    arguments = _with_underscores(arguments, parser)
    _check_options(arguments, parser)
    try:
        given = parser.parse_args(list(arguments), defaults=False).as_dict()
    except ArgumentError as error:
        raise readable(error) from None
    preset, compare, overwrite = given.pop("preset", None), given.pop("compare", None), given.pop("overwrite", False)
    if given.pop("skip_bad", False):
        given["stream"] = {**given.get("stream", {}), "skip_bad": True}
    if preset is None and not given:
        raise UserError(f"Say what to train: a preset ({', '.join(preset_names())}), a YAML file, or options.")
    first = resolve(preset, given)
    methods = [first.method, *(name.strip() for name in (compare or "").split(",") if name.strip())]
    methods = list(dict.fromkeys(methods))
    if len(methods) > 1 and first.out:
        given["out"] = None  # --out is the folder of all of them then
    configs = []
    for method in methods:
        out = str(Path(first.out) / method) if first.out and len(methods) > 1 else first.out
        configs.append(resolve(preset, {**given, "method": method, "out": out}))
        METHODS.get(method)  # a mistake in the last is found before the first is trained
    try:
        runs = [run_training(config, overwrite=overwrite) for config in configs]
    except KeyboardInterrupt:
        if len(configs) > 1:
            print("mambacl: the same command again continues the whole comparison.", file=sys.stderr)
        raise
    return _show(runs, first)


# As in mambacl.nullspace, which would load PyTorch for a word.
KINDS = ("W_delta", "W_B", "W_C", "A", "out", "W_dt", "linear", "conv")
MAPPINGS = ("--options.", "--backbone_options.", "--stream.transforms.covariance.")  # of any names
GROUPS = ("nullspace", *(f"nullspace.{kind}" for kind in KINDS), "training", "stream", "stream.transforms")


def _with_underscores(arguments: Sequence[str], parser: Any) -> list[str]:
    """--audit-images is --audit_images: both are usual."""
    known = {option for action in parser._actions for option in action.option_strings}
    changed = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        other = "--" + name[2:].replace("-", "_")
        changed.append(
            other + equals + value if name.startswith("--") and name not in known and other in known else argument
        )
    return changed


def _check_options(arguments: Sequence[str], parser: Any) -> None:
    """Names the option that is wrong, with the one that was perhaps meant."""
    known = [option for action in parser._actions for option in action.option_strings]
    for argument in arguments:
        name = argument.split("=")[0]
        if name.startswith("--") and name not in known and not name.startswith(MAPPINGS):
            last = name.lstrip("-").split(".")[-1]
            same = [option for option in known if option.split(".")[-1] == last]  # --lr is --training.lr
            hint = f" Did you mean '{same[0]}'?" if same else did_you_mean(name, known)
            raise UserError(f"There is no option '{name}'.{hint} See `mambacl train --help`.")
        if name.startswith("--") and name[2:] in GROUPS:
            raise UserError(f"The option '{name}' is a group: set {name}.NAME. See `mambacl train --help`.")


def _show(runs: list[Run], config: Any) -> int:
    from mambacl.reports import comparison_table, load_run, write_report
    from mambacl.reports.rendering import to_text

    for run in runs:
        page = write_report([run.folder])
    if len(runs) > 1:
        parent = Path(config.out) if config.out else runs[0].folder.parent
        page = write_report([run.folder for run in runs], parent / f"{config.name}-comparison-{config.seed}")
    print(to_text(comparison_table([load_run(run.folder) for run in runs])))
    print(f"\nReport: {page}")
    return 0


def resume(arguments: Sequence[str]) -> int:
    """continue a run after an interruption: `mambacl resume RUN`"""
    from mambacl.training.run import resume as resume_run

    parser = Parser(prog="mambacl resume", description="Continues a run where its last checkpoint stands.")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--device", default=None, help="another device than the run's own: cpu, cuda, cuda:N")
    given = parser.parse_args(arguments)
    return _show([resume_run(given.run, given.device)], None)


def evaluate(arguments: Sequence[str]) -> int:
    """evaluate a run's last checkpoint again: `mambacl evaluate RUN`"""
    from mambacl.training.run import evaluate as evaluate_run

    parser = Parser(prog="mambacl evaluate", description="Evaluates a run's last checkpoint over all tasks learned.")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--batch-size", type=int, default=None, help="images in a batch; changes only the speed")
    parser.add_argument("--device", default=None, help="another device than the run's own: cpu, cuda, cuda:N")
    words = "another than the run's own: task, where the task of each image is known; class or domain, where it is not"
    parser.add_argument("--scenario", default=None, help=words)
    given = parser.parse_args(arguments)
    if given.batch_size is not None and given.batch_size < 1:
        raise UserError(f"--batch-size must be at least 1, got {given.batch_size}.")
    again = evaluate_run(given.run, given.batch_size, given.device, given.scenario)
    row, recorded, total = again.counted, again.recorded, again.total
    for task, right in enumerate(row):
        print(f"task {task + 1:3}  {right:6} of {total[task]:6} right  {right / total[task]:6.1%}")
    print(f"over tasks {sum(r / n for r, n in zip(row, total, strict=True)) / len(row):.2%}, "
          f"over images {sum(row) / sum(total[: len(row)]):.2%}")  # fmt: skip
    if again.scenario != again.recorded_scenario:
        own = f"{again.recorded_scenario}-incremental"
        print(f"These counts are {again.scenario}-incremental; the run recorded {recorded}, {own}.")
    elif row == recorded:
        print("These are the counts that the run recorded.")
    else:
        print(f"The run recorded {recorded}: a difference comes from another device or other library versions.")
    return 0


def report(arguments: Sequence[str]) -> int:
    """an HTML page, figures and tables of one run or several: `mambacl report RUN...`"""
    from mambacl.reports import comparison_table, load_run, write_report
    from mambacl.reports.importing import import_records
    from mambacl.reports.rendering import to_csv, to_latex, to_markdown, to_text

    words = "Writes a page, figures and tables; several runs are compared, and with --table set beside the paper's."
    parser = Parser(prog="mambacl report", description=words)
    parser.add_argument("runs", type=Path, nargs="*", help="run folders")
    parser.add_argument("--out", type=Path, default=None, help="folder for the page")
    formats = ("text", "markdown", "latex", "csv")
    parser.add_argument("--format", choices=formats, default="text", help="of the printed table")
    parser.add_argument("--table", metavar="NAME", help="a table of the paper, with its values: main, ablation, ...")
    foreign = "accuracies from PILOT, Mammoth, Avalanche, or as CSV or JSON; may be repeated"
    parser.add_argument(
        "--import", dest="imports", type=Path, action="append", default=[], metavar="FILE", help=foreign
    )
    parser.add_argument("--import-method", metavar="NAME", help="the method of the imported files")
    parser.add_argument("--import-benchmark", metavar="NAME", help="their benchmark, such as cifar100-10")
    parser.add_argument("--accuracy", metavar="METRIC", help="with --table, instead of final_accuracy_tasks")
    parser.add_argument("--forgetting", metavar="METRIC", help="with --table, instead of forgetting")
    given = parser.parse_intermixed_args(arguments)
    if not (given.runs or given.imports or given.table):
        raise UserError("Say which runs to report, as in mambacl report runs/<preset>-<method>-0.")
    if not given.table and (given.accuracy or given.forgetting):
        raise UserError("--accuracy and --forgetting choose what stands beside the paper's values: add --table NAME.")
    imported = import_records(given.imports, given.import_method, given.import_benchmark)
    runs = list({path.resolve(): path for path in given.runs}.values())
    pages = [path for path in runs if (path / "table.csv").exists() and not (path / "config.yaml").exists()]
    if pages and len(pages) < len(runs):  # as in `mambacl report runs/*`
        print(f"Left out, being comparisons themselves: {', '.join(map(str, pages))}", file=sys.stderr)
        runs = [path for path in runs if path not in pages]
    if given.table:
        return _beside_the_paper(given, [*(load_run(path) for path in runs), *imported])
    page = write_report(runs, given.out, imported)
    table = comparison_table([*(load_run(path) for path in runs), *imported])
    print({"text": to_text, "markdown": to_markdown, "latex": to_latex, "csv": to_csv}[given.format](table))
    print(f"Report: {page}", file=sys.stderr)
    return 0


def _beside_the_paper(given: Any, records: list[Any]) -> int:
    from mambacl.reports.page import beside
    from mambacl.reports.paper_page import laid_out, long_csv, write_paper_table
    from mambacl.reports.paper_table import Names, compare_with_paper
    from mambacl.reports.rendering import to_latex, to_markdown, to_text

    chosen = {key: getattr(given, key) for key in ("accuracy", "forgetting") if getattr(given, key)}
    compared = compare_with_paper(given.table, records, Names(**chosen))
    if given.format == "csv":
        print(long_csv(compared), end="")
    else:
        print({"text": to_text, "markdown": to_markdown, "latex": to_latex}[given.format](laid_out(compared)))
    if records or given.out:  # the paper's values alone are printed, and leave nothing behind
        target = given.out or beside([record.folder for record in records])
        print(f"Report: {write_paper_table(compared, target)}", file=sys.stderr)
    return 0


def audit(arguments: Sequence[str]) -> int:
    """what has moved in a run since each task, and which updates were protected: `mambacl audit RUN`"""
    from mambacl.reports import write_report
    from mambacl.reports.audits import drift_table, updates_table
    from mambacl.reports.rendering import to_text
    from mambacl.training.run import audit as audit_run

    words = (
        "Measures, block by block, how far delta, exp(delta A), delta B, C and the output have moved since each task, "
        "on the images that --audit-images kept, and how much of each update fell into protected directions."
    )
    parser = Parser(prog="mambacl audit", description=words)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--task", type=int, default=None, help="show the blocks of this task, counted from 1")
    parser.add_argument("--device", default=None, help="another device than the run's own: cpu, cuda, cuda:N")
    given = parser.parse_args(arguments)
    found = audit_run(given.run, given.device)
    known = [entry["task"] + 1 for entry in found["tasks"]]
    if given.task is not None and given.task not in known:
        kept = (
            f"there are those of tasks {', '.join(map(str, known))}" if known else "the run kept none (--audit-images)"
        )
        raise UserError(f"No images of task {given.task} were kept: {kept}.")
    if known:
        print(to_text(drift_table(found, None if given.task is None else given.task - 1)))
    else:
        print("The run kept no images (train with --audit-images N): what has moved cannot be measured.\n")
    if found["updates"]:
        print(to_text(updates_table(found)))
    else:
        print("No update was projected.\n")
    print(f"Report: {write_report([given.run])}", file=sys.stderr)
    return 0


def plan(arguments: Sequence[str]) -> int:
    """what protecting a model will cost: `mambacl plan defocus_mamba_large_22k --image-size 192`, or of a preset"""
    import torch

    from mambacl.backbones import create_model
    from mambacl.config import RunConfig, preset_names, resolve
    from mambacl.nullspace import SETTINGS, NullSpace
    from mambacl.nullspace.plan import make_plan
    from mambacl.reports.plans import plan_text
    from mambacl.training.run import pick_device

    words = "Predicts the bytes, the FLOPs of a projected step and the time of a decomposition, before any training."
    parser = Parser(prog="mambacl plan", description=words)
    parser.add_argument("backbone", help="a model's name (`mambacl models` lists them), or a preset's")
    parser.add_argument("--image-size", type=int, default=None, help="pixels; the preset's or the model's own")
    parser.add_argument("--setting", default=None, help=f"one of {', '.join(SETTINGS)}; the preset's, or paper")
    parser.add_argument("--tasks", type=int, default=None, help="consolidations, for --keep-tasks and the total time")
    parser.add_argument("--protected", type=float, default=0.1, help="share of directions assumed to be protected")
    parser.add_argument("--storage", default=None, help="precision of the projectors: float32, bfloat16, ...")
    parser.add_argument("--covariances", default=None, help="where they are kept: device, cpu, disk")
    parser.add_argument("--layers", default=None, help="ssm, or all")
    parser.add_argument("--keep-tasks", action="store_true", default=None, help="each task's covariances apart")
    parser.add_argument("--blocks", type=int, default=None, help="the first so many blocks only")
    parser.add_argument("--device", default="auto", help="where to time the decomposition: cpu, cuda")
    parser.add_argument("--no-calibration", action="store_true", help="leave the time out")
    given = parser.parse_args(arguments)
    for name in ("tasks", "image_size"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(given, name)}.")
    known = given.backbone in preset_names()
    config = resolve(given.backbone, {}) if known else RunConfig(backbone=given.backbone)
    with torch.device("meta"):
        model: Any = create_model(config.backbone, num_classes=0, **config.backbone_options)
        size = given.image_size or config.stream.transforms.image_size or model.default_cfg["input_size"][-1]
        images = torch.empty(1, 3, size, size)
    keys = ("storage", "covariances", "layers", "keep_tasks", "blocks")
    changes = {key: value for key in keys if (value := getattr(given, key)) is not None}
    if given.setting and known:  # what the preset protects, in the other setting
        own_rules = config.nullspace
        changes = {"eta": own_rules.eta, "layers": own_rules.layers, "blocks": own_rules.blocks, **changes}
    space = NullSpace(model, given.setting or config.nullspace, **changes)
    own = config.stream.tasks if isinstance(config.stream.tasks, int) else len(config.stream.tasks)
    tasks, device = given.tasks or (own if known else 10), pick_device(given.device)
    made = make_plan(space, images, given.protected, tasks, None if given.no_calibration else device)
    print(plan_text(made, config.backbone, size, given.protected, tasks, space.setting.storage, str(device)))
    return 0


def models(arguments: Sequence[str]) -> int:
    """list the backbones: size, FLOPs, public weights, licence, accuracy"""
    import torch

    from mambacl.backbones import create_model
    from mambacl.backbones.flops import count_flops
    from mambacl.backbones.registry import MODELS

    parser = Parser(prog="mambacl models", description="Lists the backbones.")
    parser.add_argument("name", nargs="?", default="", help="only models whose name contains this")
    given = parser.parse_args(arguments)
    names = [name for name in sorted(MODELS.names()) if given.name in name]
    if not names:
        raise UserError(f"No model's name contains '{given.name}'.{did_you_mean(given.name, MODELS.names())}")
    print(
        f"{'name':26} {'parameters':>11} {'px':>4} {'GFLOP':>7}  {'top-1':>5}  licence and file of the public weights"
    )
    for name in names:
        with torch.device("meta"):
            model: Any = create_model(name).eval()
        size, weights = model.default_cfg["input_size"][-1], MODELS.get(name).weights
        count, flops = sum(p.numel() for p in model.parameters()), count_flops(model, size)[0]
        note, top1 = "none", ""
        if weights is not None:
            source = "in the package" if weights.packaged else str(weights.url).rpartition("/")[2]
            note, top1 = f"{weights.licence}: {source}", f"{weights.top1:.1f}" if weights.top1 else ""
        print(f"{name:26} {count / 1e6:>9.2f} M {size:>4} {flops / 1e9:>7.2f}  {top1:>5}  {note}", flush=True)
    nano = "; that of defocus_mamba_nano on Tiny-ImageNet at 32 px" if "defocus_mamba_nano" in names else ""
    print("\nGFLOP of one image: multiply-adds count as two, elementwise operations not at all, the scan as 9 "
          f"operations a token, channel and state. top-1: per cent on ImageNet-1k, as published{nano}.")  # fmt: skip
    if "defocus_mamba_large_22k" in names:
        with torch.device("meta"):
            model = create_model("defocus_mamba_large_22k", num_classes=1000, head_type="IN1k_cls", use_aux_loss=False)
        whole, scan = (operations / 1e9 for operations in count_flops(model.eval(), 192))
        print(f"De-focus-L with a linear head at 192 px: {whole:.1f}, or {whole - scan:.1f} without the scan, where "
              "the paper says 91.7.")  # fmt: skip
    return 0


def methods(arguments: Sequence[str]) -> int:
    """list the continual-learning methods"""
    from mambacl.methods import METHODS

    Parser(prog="mambacl methods", description="Lists the methods.").parse_args(arguments)
    for name in METHODS.names():
        print(f"{name:14} {METHODS.get(name).summary}")
    return 0


def bench(arguments: Sequence[str]) -> int:
    """how fast this machine does it, part by part: `mambacl bench scan step --device cpu`"""
    from mambacl.bench import PARTS, SHAPES
    from mambacl.bench import bench as run_bench

    words = "Times the parts named, or all, at sizes that suit the device. Ratios are those of one run."
    parser = Parser(prog="mambacl bench", description=words)
    parser.add_argument("parts", metavar="PART", nargs="*", help=f"of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there, with machine and date")
    shapes = f"scans to time: {', '.join(SHAPES)}; those that suit the device if left out"
    parser.add_argument("--shape", nargs="+", action="extend", default=[], metavar="NAME", help=shapes)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats, to see that all is well")
    parser.add_argument("--root", type=Path, default=None, help="folder with CIFAR-100's files, for the part run")
    given = parser.parse_intermixed_args(arguments)
    run_bench(given.parts, given.device, given.json, given.shape, given.quick, given.root)
    return 0


def convert(arguments: Sequence[str]) -> int:
    """a public checkpoint as safetensors: `mambacl convert FILE OUT.safetensors`"""
    from mambacl.backbones import convert as convert_file

    parser = Parser(prog="mambacl convert", description="Writes the weights of a checkpoint as safetensors; nothing "
                    "from the file is run.")  # fmt: skip
    parser.add_argument("file", type=Path, help="a .pth, .pt, .bin or .safetensors file")
    parser.add_argument("out", type=Path, help="the file to write, ending in .safetensors")
    parser.add_argument("--key", default=None, help="entry that holds the weights, such as model_ema")
    given = parser.parse_args(arguments)
    account = convert_file(given.file, given.out, given.key)
    print(f"Tensors written to {given.out}: {len(account.loaded)}.")
    if account.inert:
        print(f"Foreign classes made inert: {', '.join(account.inert)}.")
    return 0


def data(arguments: Sequence[str]) -> int:
    """list, prepare, check and show data sets: `mambacl data check cifar100 --root DIR`"""
    from mambacl.data_command import main as run_data

    words = "Lists the data sets, makes a folder hold one, checks it image by image, draws the tasks of a stream."
    return run_data(arguments, Parser(prog="mambacl data", description=words))


def paper(arguments: Sequence[str]) -> int:
    """a table or figure of the paper, from its runs to the page: `mambacl paper ablation --scale nano`"""
    from mambacl.paper.command import main as run_paper

    words = "Trains the runs of a table or figure of the paper, as far as they are not there, and shows both's values."
    return run_paper(arguments, Parser(prog="mambacl paper", description=words))


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    command.__name__: command
    for command in (train, resume, evaluate, report, paper, audit, plan, data, bench, models, methods, convert)
}


def usage() -> str:
    lines = [f"  {name:10} {command.__doc__}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: mambacl COMMAND ...", "", "Teaches a Mamba model new classes without forgetting the old ones.", "",
         *lines, "", "`mambacl COMMAND --help` says more."]
    )  # fmt: skip


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"mambacl {version('mambacl')}")
        return 0
    command = COMMANDS.get(arguments[0])
    if command is None:
        hint = did_you_mean(arguments[0], COMMANDS)
        return _fail(f"There is no command '{arguments[0]}'.{hint} Known: {', '.join(COMMANDS)}.", 2)
    return command(arguments[1:])


def main(arguments: Sequence[str] | None = None) -> int:
    _print_any_name()
    try:
        code = _dispatch(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()  # here, where a reader that has gone is no mistake
        return code
    except UserError as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:
        return _fail("Interrupted.", 130)
    except BrokenPipeError:  # the reader of our output has gone
        sys.stderr.close()
        return 1
    except OSError as error:
        return _fail(f"{error.strerror or error}: {error.filename or 'no file named'}.", 2)
    except Exception as error:
        from mambacl.training.loop import TrainingError

        if isinstance(error, TrainingError):
            return _fail(str(error), 1)
        raise


def _print_any_name() -> None:
    """Names of files and classes that the terminal's encoding lacks are printed with escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _fail(sentence: str, code: int) -> int:
    print(f"mambacl: {sentence}", file=sys.stderr)
    return code
