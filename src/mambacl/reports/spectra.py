"""The spectra of a run by feature, one spectrum per block.

A run stores the role of each part. For a run that does not, the role follows from the part's name, e.g.
`blocks.0.mixer.x_proj.weight[0:12]`: the rows of x_proj are W_delta, W_B and W_C, in that order, and the setting says
which of them are projected.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mambacl.nullspace.settings import FEATURES
from mambacl.reports.runs import RunRecord, Spectrum

ROWS_OF_X_PROJ = ("W_delta", "W_B", "W_C")
NAME = re.compile(r"(?:(?P<block>.*\d)\.)?(?P<parameter>[^\[]+)(?P<rows>\[.*\])?")


@dataclass(frozen=True)
class FeatureSpectra:
    """The spectra of one feature in all blocks. Parts that share the feature appear once, under all their names."""

    roles: tuple[str, ...]
    feature: str | None
    spectra: Mapping[str, Spectrum]
    """by block number, as in "3" or "1.0", in the model's order"""

    @property
    def title(self) -> str:
        return " and ".join(self.roles)

    @property
    def slug(self) -> str:
        """The roles, for a file name."""
        return re.sub(r"[^A-Za-z0-9]+", "-", "-".join(self.roles)).strip("-").lower()

    @property
    def meaning(self) -> str:
        """The feature in words; empty if the setting is unknown."""
        return FEATURES.get(self.feature or "", "")


def spectra_by_feature(record: RunRecord) -> list[FeatureSpectra]:
    """The spectra of each feature, in the order of the roles in a block."""
    if record.parts:
        return _as_described(record)
    found: dict[tuple[str, ...], dict[str, Spectrum]] = {}
    for block, roles in _by_block(record).items():
        for shared, spectrum in _shared(roles).items():
            found.setdefault(shared, {})[block] = spectrum
    return [FeatureSpectra(roles, _feature(roles, record.setting), spectra) for roles, spectra in found.items()]


def _as_described(record: RunRecord) -> list[FeatureSpectra]:
    """From the roles stored with the spectra: parts of a block with the same feature share its spectrum."""
    shared: dict[tuple[str, str], list[str]] = {}  # block and feature -> kinds
    spectra: dict[tuple[str, str], Spectrum] = {}
    for name, part in record.parts.items():
        if name in record.spectra:
            key = part["block"], part["feature"]
            spectra[key] = record.spectra[name]
            if part["kind"] not in shared.setdefault(key, []):
                shared[key].append(part["kind"])
    found: dict[tuple[tuple[str, ...], str], dict[str, Spectrum]] = {}
    for (block, feature), kinds in shared.items():
        number = ".".join(re.findall(r"\d+", block)) or block
        direction = re.search(r"\((.*)\)", feature)
        roles = tuple(kind if direction is None else f"{kind} ({direction[1]})" for kind in kinds)
        found.setdefault((roles, feature.partition("(")[0]), {})[number] = spectra[block, feature]
    return [FeatureSpectra(roles, feature, by_block) for (roles, feature), by_block in found.items()]


def _by_block(record: RunRecord) -> dict[str, dict[str, Spectrum]]:
    """Block number -> role -> spectrum."""
    found: dict[tuple[str, str], list[tuple[str, Spectrum]]] = {}  # block and parameter -> its rows
    for name in sorted(record.spectra, key=_natural):
        match = NAME.fullmatch(name)
        block, parameter, rows = (
            (match["block"] or "", match["parameter"], match["rows"] or "") if match else ("", name, "")
        )
        found.setdefault((block, parameter), []).append((rows, record.spectra[name]))
    blocks: dict[str, dict[str, Spectrum]] = {}
    for (block, parameter), parts in sorted(found.items(), key=lambda item: (_natural(item[0][0]), _place(item[0][1]))):
        number = ".".join(re.findall(r"\d+", block)) or block
        roles = _roles(parameter, [rows for rows, _ in parts], record.setting)
        for role, (_, spectrum) in zip(roles, parts, strict=True):
            blocks.setdefault(number, {})[role] = spectrum
    return blocks


def _roles(parameter: str, rows: list[str], setting: Mapping[str, Any]) -> list[str]:
    """The paper's names for the parts of a parameter; if unknown, the parameter's name and rows."""
    name = parameter.removesuffix(".weight").rpartition(".")[2]
    if name == "A_log":
        return ["A"] * len(rows)
    if name == "out_proj":
        return ["out"] * len(rows)
    projected = [kind for kind in ROWS_OF_X_PROJ if _is_projected(setting.get(kind))]
    kinds = projected if len(projected) == len(rows) else list(ROWS_OF_X_PROJ) if len(rows) == 3 else None
    if name.startswith("x_proj") and kinds is not None:
        return [kind if name in ("x_proj", "x_proj_weight") else f"{kind} ({name})" for kind in kinds]
    return [name + row for row in rows]


def _shared(roles: Mapping[str, Spectrum]) -> dict[tuple[str, ...], Spectrum]:
    """Merges roles with the same spectrum and rank."""
    clusters: list[tuple[list[str], Spectrum]] = []
    for role, spectrum in roles.items():
        for names, other in clusters:
            if spectrum.rank == other.rank and np.array_equal(spectrum.values, other.values):
                names.append(role)
                break
        else:
            clusters.append(([role], spectrum))
    return {tuple(names): spectrum for names, spectrum in clusters}


def _feature(roles: tuple[str, ...], setting: Mapping[str, Any]) -> str | None:
    rule = setting.get(roles[0].partition(" ")[0])
    return str(rule["feature"]) if isinstance(rule, Mapping) and "feature" in rule else None


def _is_projected(rule: Any) -> bool:
    return isinstance(rule, Mapping) and bool(rule.get("trains")) and bool(rule.get("projected"))


def _natural(text: str) -> list[tuple[int, int, str]]:
    """For natural sorting: blocks.2 before blocks.10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.findall(r"\d+|\D+", text)]


def _place(parameter: str) -> int:
    """For sorting in the paper's order: x_proj, A_log, out_proj."""
    return next((i for i, word in enumerate(("x_proj", "A_log", "out_proj")) if word in parameter), 3)
