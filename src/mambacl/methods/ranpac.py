"""RanPAC (McDonnell et al., *RanPAC: Random Projections and Pre-trained Models for Continual Learning*, NeurIPS 2023):
adapters are tuned in the first task, then ridge regression on 10,000 random ReLU units of the adapted feature.

Its recipe: SGD, rates 0.01, cosine, 20 passes, weight decay 5e-4, batches of 48. Without the tuning in the first task
it is the method `analytic` with `--features.depths final --classifier_options.rule ranpac`.
"""

from typing import Any, ClassVar

from mambacl.methods.first_task import FirstTask
from mambacl.methods.registry import METHODS


class RanPAC(FirstTask):
    name = "ranpac"
    summary = "adapters tuned in the first task, then ridge regression on random units (RanPAC)"
    own_classifier: ClassVar[str] = "ridge"

    def classifier_defaults(self) -> dict[str, Any]:
        return {"rule": "ranpac"}


METHODS.add(RanPAC.name, RanPAC)
