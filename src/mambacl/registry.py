"""Tables of named entries, such as backbones, methods and data sets. Other packages add entries by entry point."""

import difflib
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Generic, TypeVar

from mambacl.errors import UserError

T = TypeVar("T")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' Did you mean ...?' if a known word is close, else empty."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


def unknown(noun: str, name: str, known: Iterable[str]) -> UserError:
    """The error for an unknown word."""
    known = list(known)
    return UserError(f"There is no {noun} '{name}'.{did_you_mean(name, known)} Known: {', '.join(known)}.")


class Registry(Generic[T]):
    def __init__(
        self, noun: str, group: str, own: Mapping[str, str] | None = None, old_group: str | None = None
    ) -> None:
        """`noun` is for error messages. `group` is the entry point group whose members are imported on the first
        look-up; `old_group` is its former name. `own` are the modules of this package's entries by name, each imported
        when it is looked up."""
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
        """The names so far, without importing other packages."""
        return list(dict.fromkeys((*self.own, *self._entries)))

    def check(self, name: str) -> None:
        """Refuses an unknown name, without importing the entry's module."""
        self._load()
        if name not in self.known():
            raise unknown(self.noun, name, self.known())

    def get(self, name: str) -> T:
        self.check(name)
        if name not in self._entries:
            import_module(self.own[name])
        return self._entries[name]

    def _load(self) -> None:
        """Imports the entry points' modules, which register their entries."""
        if not self._loaded:
            from importlib.metadata import entry_points  # late: importing this is slow

            self._loaded = True
            old = entry_points(group=self.old_group) if self.old_group else ()
            for point in (*entry_points(group=self.group), *old):
                try:
                    point.load()
                except Exception as error:
                    self._loaded = False
                    raise UserError(
                        f"The {self.noun} '{point.name}' of another package ({point.value}) cannot be loaded "
                        f"({type(error).__name__}: {error}): fix or uninstall that package."
                    ) from error
