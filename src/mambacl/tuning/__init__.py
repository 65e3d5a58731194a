"""What trains in a backbone: some of its parameters, or modules added to it."""

from mambacl.tuning.adapters import AdapterOptions, AdapterSets
from mambacl.tuning.base import AddedModules, ModelParameters, Tuning
from mambacl.tuning.recomputing import recompute
from mambacl.tuning.scale_shift import ScaleShiftSets

__all__ = ["AdapterOptions", "AdapterSets", "AddedModules", "ModelParameters", "ScaleShiftSets", "Tuning", "recompute"]
