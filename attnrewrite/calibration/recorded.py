"""A step that is taken again and again on tensors of the same shapes: recorded on a GPU, where small operations cost
what launching them does.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("attnrewrite")

BEFORE = 3  # steps that are taken before one is recorded: what libraries set up at first is no part of it

Call = Callable[[], Any]
Recorder = Callable[[Call], Call]  # what a call does on its device, as a call that does it again


class Recorded:
    """`step`, which changes what it does in place and gives nothing. Its tensors are copied to where the recorded one
    reads them; one that comes with other shapes is taken as it is, and so is every one where there is no `recorder`, or
    where what `step` does cannot be recorded (it asks the device for a number).
    """

    def __init__(self, step: Callable[..., None], recorder: Recorder | None) -> None:
        self.step, self.recorder = step, recorder
        self.taken = 0
        self.places: tuple[Tensor, ...] = ()
        self.replay: Call | None = None

    def __call__(self, *tensors: Tensor) -> None:
        if self.recorder is not None and self.taken == BEFORE:
            self._record(self.recorder, tensors)
        self.taken += 1
        if self.replay is None or [each.shape for each in tensors] != [each.shape for each in self.places]:
            self.step(*tensors)
            return
        for place, tensor in zip(self.places, tensors, strict=True):
            place.copy_(tensor)
        self.replay()

    def _record(self, recorder: Recorder, tensors: tuple[Tensor, ...]) -> None:
        """Record a step on copies of `tensors`, which is not taken by that."""
        self.places = tuple(torch.empty_like(each) for each in tensors)
        try:
            self.replay = recorder(lambda: self.step(*self.places))
        except RuntimeError as error:
            log.info("steps are taken one operation at a time, as they cannot be recorded: %s", error)


def recorder_for(device: torch.device) -> Recorder | None:
    """What records there: CUDA graphs on a GPU, nothing on a processor."""
    return cuda_graph if device.type == "cuda" else None


def cuda_graph(call: Call) -> Call:
    """What `call` launches on this thread's GPU, as one launch. Raises RuntimeError where it waits for the GPU."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
