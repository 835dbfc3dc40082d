"""TVM behind one door: its names change with every release, and every one of them is spelled here.

It compiles exported programs and runs what it compiled. It does not know attention forms or models. `relax_pipeline`
offers the schedules of `schedules` to whoever compiles Relax modules of their own.
"""

from typing import Any


def relax_pipeline(core: str = "host", precision: str = "fp32") -> Any:
    """A pipeline for `tvm.compile(module, target, relax_pipeline=...)` with our schedules for a CPU.

    `core` is a processor of profiles.toml, or `host`. The module is one whose main is a single block of dataflow, of
    fixed shapes, from TVM's importers of torch and ONNX or written by hand; weights are packed where they are constants
    of it (keep_params_as_input=False). Whatever no rule takes goes TVM's default way, and all of a module of another
    kind does. Of torch's programs those import best that keep attention whole (run_ep_decomposition=False).

    `precision` is one of fp32, fp16 and int8, for what lies between kernels; inputs and results stay as they are. A
    module is not rounded to integers here: where it does that itself, products are of integers in any precision. What
    float16 makes of a module is not checked here, either.

    Raises:
        InputError: there is no processor or precision of that name, with the nearest; or the processor has no
            instructions for the precision.
    """
    from attnrewrite.targets.tvm.schedules.pipelines import cpu as pipeline
    from attnrewrite.targets.tvm.schedules.precision import require, stored
    from attnrewrite.targets.tvm.schedules.profile import profile

    processor = profile(core)
    require(precision, core)
    return pipeline.relax_pipeline(processor.storing(stored(precision, processor)))


__all__ = ["relax_pipeline"]
