"""TVM behind one door: its names change with every release, and every one of them is spelled here.

It compiles exported programs and runs what it compiled. It does not know attention forms or models. `relax_pipeline`
offers the schedules of `schedules` to whoever compiles Relax modules of their own.
"""

from typing import Any


def relax_pipeline(core: str = "host") -> Any:
    """A pipeline for `tvm.compile(module, target, relax_pipeline=...)` with our schedules for a CPU.

    `core` is a processor of profiles.toml, or `host`. The module is one whose main is a single block of dataflow, of
    fixed shapes, from TVM's importers of torch and ONNX or written by hand; weights are packed where they are constants
    of it (keep_params_as_input=False). Whatever no rule takes goes TVM's default way, and all of a module of another
    kind does. Of torch's programs those import best that keep attention whole (run_ep_decomposition=False).

    Raises:
        InputError: there is no processor of that name; the message has the nearest.
    """
    from attnrewrite.targets.tvm.schedules.cpu import pipeline
    from attnrewrite.targets.tvm.schedules.profile import profile

    return pipeline.relax_pipeline(profile(core))


__all__ = ["relax_pipeline"]
