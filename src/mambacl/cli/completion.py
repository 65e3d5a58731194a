"""The command completion, and the words that it suggests.

The scripts ask `mambacl __complete WORD...` on every press of the tab key, so that they fit the installed version.
Where it has nothing to suggest, the shell completes file names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

from mambacl.cli.command import Command, all_options
from mambacl.config import preset_names
from mambacl.options import Option, is_group, is_mapping

COMPLETE = "__complete"
BASH = """\
_mambacl() {
    COMPREPLY=()
    local word
    while IFS= read -r word; do
        COMPREPLY+=("$word")
    done < <("$1" __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -o default -F _mambacl mambacl
"""
ZSH = """\
#compdef mambacl
_mambacl() {
    local -a found
    found=("${(@f)$("${words[1]}" __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    found=("${(@)found:#}")
    if (( ${#found} )); then compadd -- "${found[@]}"; else _files; fi
}
compdef _mambacl mambacl
"""
FISH = """\
function __mambacl_complete
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    set -l found ($before[1] __complete $before[2..-1] "$current" 2>/dev/null)
    if test -n "$found"
        printf '%s\\n' $found
    else
        __fish_complete_path "$current"
    end
end
complete -c mambacl -f -a '(__mambacl_complete)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], "bash, zsh or fish"]) -> None:
    """print a script that completes commands, options and names with the tab key: `mambacl completion bash`

    Load it when a shell starts. In ~/.bashrc: eval "$(mambacl completion bash)". In ~/.zshrc, after compinit: eval
    "$(mambacl completion zsh)". In ~/.config/fish/config.fish: mambacl completion fish | source."""
    print(SCRIPTS[shell], end="")


def candidates(commands: Mapping[str, Command], words: Sequence[str]) -> list[str]:
    """The words that can stand in place of the last of `words`, whose beginning it is, after the others."""
    *before, current = words or [""]
    if current == "=":  # bash makes three words of --option=value
        current = ""
    before = [word for word in before if word != "="]
    option, equals, value = current.partition("=")
    if equals and option.startswith("--"):
        return [f"{option}={word}" for word in candidates(commands, [*before, option, value])]
    return [word for word in _after(commands, before) if word.startswith(current)] if _plain(current) else []


def _after(commands: Mapping[str, Command], before: list[str]) -> list[str]:
    count = 2 if " ".join(before[:2]) in commands else 1
    name = " ".join(before[:count])
    below = [other.split()[1] for other in commands if other.startswith(f"{name} ")] if len(before) == 1 else []
    if not before:
        return [*dict.fromkeys(other.split()[0] for other in commands), "--help", "--version"]
    if name not in commands:
        return [*below, "--help"] if below else []
    return [*below, *_of_command(commands[name], before[count:])]


def _of_command(command: Command, before: list[str]) -> list[str]:
    """The values of the option that the last word names; otherwise options, and the words of the next positional."""
    run_options = {f"--{name}": option for name, option in all_options(command.config).items()}
    known: dict[str, Option] = {**run_options, **command.options} if command.takes_run_options else command.options
    last = before[-1] if before else ""
    if last in ("-h", "--help"):
        groups = [name[2:] for name, option in run_options.items() if is_group(option.kind) or is_mapping(option.kind)]
        return ["run", *groups, "all"] if command.takes_run_options else []
    if last in known and known[last].kind is not bool:
        return _values(command, known[last])
    if last in known and last not in command.options:  # an option of the run needs a value: true or false
        return ["true", "false"]
    settable = [typed for typed, option in known.items() if not (is_group(option.kind) or is_mapping(option.kind))]
    place = _positionals(before, known, command)
    following = [*command.positionals[place:], *([command.rest] if command.rest else [])]
    return [*(_values(command, following[0]) if following else []), *settable, "--help"]


def _positionals(before: list[str], known: Mapping[str, Option], command: Command) -> int:
    """How many of these words are neither options nor their values."""
    count, value = 0, False
    for word in before:
        flag = word in command.options and command.options[word].kind is bool
        count += not value and not word.startswith("-")
        value = word.startswith("--") and "=" not in word and word in known and not flag
    return count


def _values(command: Command, option: Option) -> list[str]:
    """What an option or positional can be, as far as that is a list of words."""
    choices = [word for kind in (option.kind, *get_args(option.kind)) if get_origin(kind) is Literal
               for word in get_args(kind)]  # fmt: skip
    return choices or NAMES.get(f"{command.name} {option.name}", NAMES.get(option.name, lambda: []))()


def _plain(word: str) -> bool:
    return re.fullmatch(r"[\w./:+=,-]*", word) is not None


# Names of what there is, none of which imports PyTorch


def _models() -> list[str]:
    from mambacl.cli.models import recorded

    return list(recorded()["models"])


def _methods() -> list[str]:
    from mambacl.methods.registry import METHODS

    return METHODS.known()


def _classifiers() -> list[str]:
    from mambacl.classifiers.registry import CLASSIFIERS

    return ["auto", *CLASSIFIERS.known()]


def _metrics() -> list[str]:
    from mambacl.training.metrics import METRICS

    return METRICS.known()


def _settings() -> list[str]:
    from mambacl.nullspace.settings import SETTINGS

    return list(SETTINGS)


def _designs() -> list[str]:
    from mambacl.paper.designs import DESIGNS

    return list(DESIGNS)


def _parts() -> list[str]:
    from mambacl.bench.names import PARTS

    return list(PARTS)


def _shapes() -> list[str]:
    from mambacl.bench.shapes import SHAPES

    return list(SHAPES)


def _runs() -> list[str]:
    """Runs in the default folder; the shell completes the paths of others."""
    return [str(path.parent) for path in sorted(Path("runs").glob("*/config.yaml")) if _plain(path.parent.name)]


NAMES: dict[str, Callable[[], list[str]]] = {
    "preset": preset_names,
    "backbone": _models,
    "plan backbone": lambda: [*_models(), *preset_names()],
    "model": _models,
    "method": _methods,
    "compare": _methods,
    "classifier": _classifiers,
    "setting": _settings,
    "metric": _metrics,
    "design": _designs,
    "part": _parts,
    "shape": _shapes,
    "run": _runs,
    "device": lambda: ["auto", "cpu", "cuda"],
}
"""by the name of the option or positional, with or without its command"""
