"""Kinds of drift correction, one file each; `KINDS` has them by name."""

from mambacl.classifiers.drifts.adagauss import AdaGauss
from mambacl.classifiers.drifts.adc import ADC
from mambacl.classifiers.drifts.base import Drift
from mambacl.classifiers.drifts.dpcr import DPCR
from mambacl.classifiers.drifts.efc import EFC
from mambacl.classifiers.drifts.ldc import LDC
from mambacl.classifiers.drifts.linear import Linear
from mambacl.classifiers.drifts.shift import SDC, Shift
from mambacl.classifiers.drifts.sldc import SLDC, SLDCLinear

KINDS: dict[str, type[Drift]] = {
    kind.name: kind for kind in (Shift, Linear, SDC, LDC, ADC, EFC, AdaGauss, DPCR, SLDCLinear, SLDC)
}
