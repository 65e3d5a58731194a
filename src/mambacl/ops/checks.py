"""Shape checks that several operators share."""

from torch import Tensor

from mambacl.errors import UserError


def check_channels(x: Tensor, **vectors: Tensor | None) -> None:
    for name, vector in vectors.items():
        if vector is not None and vector.shape != x.shape[-1:]:
            raise UserError(f"{name} must have one value per channel, ({x.shape[-1]},), got {shapes(vector)}.")


def shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
