"""A table of named things that other packages extend by entry point. Backbones, methods and data sets each have one."""

import difflib
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from mambacl.errors import UserError

T = TypeVar("T")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' Did you mean ...?' when a known word is close, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


class Registry(Generic[T]):
    def __init__(
        self, noun: str, group: str, own: Mapping[str, str] | None = None, old_group: str | None = None
    ) -> None:
        """`noun` for error messages; `group` is the entry point group whose members are imported at the first
        look-up, `old_group` what it was called before; `own`: the modules of the package's own entries, by name, each
        imported when it is looked up."""
        self.noun, self.group, self.own, self.old_group = noun, group, dict(own or {}), old_group
        self._entries: dict[str, T] = {}
        self._loaded = False

    def add(self, name: str, entry: T) -> None:
        if name in self._entries and self._entries[name] is not entry:
            raise ValueError(f"The {self.noun} '{name}' is registered twice.")
        self._entries[name] = entry

    def names(self) -> list[str]:
        self._load()
        return self.known()

    def known(self) -> list[str]:
        """The names so far, whether or not other packages can be loaded."""
        return list(dict.fromkeys((*self.own, *self._entries)))

    def check(self, name: str) -> None:
        """Refuses a name that is not there, without importing what has it."""
        self._load()
        if name not in self.known():
            hint = did_you_mean(name, self.known())
            raise UserError(f"There is no {self.noun} '{name}'.{hint} Known: {', '.join(self.known())}.")

    def get(self, name: str) -> T:
        self.check(name)
        if name not in self._entries:
            import_module(self.own[name])
        return self._entries[name]

    def _load(self) -> None:
        """Importing an entry point's module is enough: what it holds registers itself."""
        if not self._loaded:
            self._loaded = True
            old = entry_points(group=self.old_group) if self.old_group else ()
            for point in (*entry_points(group=self.group), *old):
                try:
                    point.load()
                except Exception as error:
                    self._loaded = False
                    raise UserError(
                        f"The {self.noun} '{point.name}' of another package ({point.value}) cannot be loaded "
                        f"({type(error).__name__}: {error}): mend or uninstall that package."
                    ) from error
