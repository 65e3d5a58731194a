"""Projectors that are stored in CPU memory or on disk: how they reach the device when a step is projected."""

import torch
from torch import Tensor

from mambacl.errors import UserError

STACK_BYTES = 1 << 28  # the most that is brought to the device at once
Coming = tuple[int, Tensor, torch.cuda.Event]


class Carrier:
    """Brings tensors to the device in the order of their use. On a GPU, the next one is copied while the current one is
    used; after the last follows the first, for the next step. So two of them are on the GPU."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._here: tuple[int, Tensor] | None = None
        self._coming: Coming | None = None
        self._stream: torch.cuda.Stream | None = None

    def add(self, tensor: Tensor) -> int:
        """Returns its number, for `bring`."""
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def bring(self, number: int, device: torch.device) -> Tensor:
        if device.type != "cuda":
            return self.tensors[number].to(device)
        if torch.cuda.is_current_stream_capturing():
            raise UserError(
                "A CUDA graph cannot record how projectors come from CPU memory or disk: set nullspace.projectors to "
                "device."
            )
        if self._here is None or self._here[0] != number or self._here[1].device != device:
            self._here = number, self._taken(number, device)
            following = (number + 1) % len(self.tensors)
            self._coming = self._started(following, device) if following != number else None
        return self._here[1]

    def _taken(self, number: int, device: torch.device) -> Tensor:
        """Waits for the copy, which is usually under way."""
        coming = self._coming
        if coming is None or coming[0] != number or coming[1].device != device:
            coming = self._started(number, device)
        _, tensor, copied = coming
        main = torch.cuda.current_stream(device)
        main.wait_event(copied)
        tensor.record_stream(main)
        return tensor

    def _started(self, number: int, device: torch.device) -> Coming:
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            tensor = self.tensors[number].to(device, non_blocking=True)
            return number, tensor, self._stream.record_event()
