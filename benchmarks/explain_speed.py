"""How long explain takes, and how much memory: beyond torch's own export for FX, from the file alone for ONNX.

    python benchmarks/explain_speed.py [--models deit_base_patch16_224 ...] [--onnx-megabytes 400] [--json speed.json]

Each measurement runs in a process of its own, with random weights and one thread. `export` is torch.export with an open
batch, `explain` all that attnrewrite does after it; their ratio is of one run. For ONNX, `peak` is what the process
holds at most beyond what it held after importing attnrewrite, over the size of the file and its external data.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODELS = ("deit_base_patch16_224", "swin_base_patch4_window7_224", "vit_large_patch16_224", "samvit_base_patch16")


def explain_model(name: str) -> dict[str, object]:
    """Seconds of torch.export and of everything after it, and the most memory held, for a timm model."""
    import torch

    from attnrewrite.frontends.torchvision import import_torchvision

    import_torchvision()
    import timm

    from attnrewrite.frontends import capture
    from attnrewrite.patterns.fx.graph import FxGraph
    from attnrewrite.patterns.matcher import scan

    torch.set_num_threads(1)
    model = timm.create_model(name).eval()
    inputs = (torch.randn(1, *model.default_cfg["input_size"]),)
    start = time.perf_counter()
    program, _ = capture.export(model, inputs)
    exported = time.perf_counter()
    found = scan(FxGraph(capture.capture(name, program, inputs).module), name)
    done = time.perf_counter()
    export_s, explain_s = exported - start, done - exported
    return {
        "model": name, "sites": len(found), "near_misses": len(found.near_misses),
        "export_s": round(export_s, 2), "explain_s": round(explain_s, 2), "ratio": round(explain_s / export_s, 2),
        "peak_gib": round(_held() / 2**30, 1),
    }  # fmt: skip


def write_onnx(megabytes: int, path: Path) -> None:
    """A transformer of about `megabytes` of float32 weights, exported by torch."""
    import torch

    from attnrewrite.frontends.torchvision import import_torchvision

    import_torchvision()
    import timm

    width = 768
    depth = max(1, round(megabytes * 1e6 / 4 / (12 * width * width)))
    model = timm.create_model("deit_base_patch16_224", depth=depth, embed_dim=width).eval()
    program = torch.onnx.export(
        model, (torch.randn(2, 3, 224, 224),), dynamo=True, verbose=False,
        dynamic_shapes=({0: torch.export.Dim("batch")},),
    )  # fmt: skip
    assert program is not None
    program.save(path, external_data=True)


def explain_onnx(path: Path) -> dict[str, object]:
    """Seconds and peak memory of explaining an ONNX file."""
    import attnrewrite as ar
    from attnrewrite.frontends import onnx_file

    assert onnx_file is not None  # imported, so that its memory is not counted
    before, start = _held(), time.perf_counter()
    found = ar.explain(path)
    seconds = time.perf_counter() - start
    size = sum(file.stat().st_size for file in path.parent.iterdir())
    return {
        "file_megabytes": round(size / 1e6), "sites": len(found), "explain_s": round(seconds, 2),
        "peak_over_size": round((_held() - before) / size, 2),
    }  # fmt: skip


def _held() -> int:
    """The most bytes this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _apart(*arguments: str) -> dict[str, object]:
    """The result of this script in a process of its own."""
    print(" ".join(arguments), "...", file=sys.stderr)
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if lines else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS, help="timm models")
    parser.add_argument("--onnx-megabytes", type=int, default=400, help="size of the ONNX file, 0 for none")
    parser.add_argument("--json", type=Path, help="write the figures and the environment here")
    parser.add_argument("--one", choices=["model", "write", "onnx"], help=argparse.SUPPRESS)
    parser.add_argument("--of", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one == "write":
        write_onnx(given.onnx_megabytes, Path(given.of))
    elif given.one:
        print(json.dumps(explain_model(given.of) if given.one == "model" else explain_onnx(Path(given.of))))
    else:
        _report(given.models, given.onnx_megabytes, given.json)


def _report(models: list[str], megabytes: int, out: Path | None) -> None:
    from attnrewrite.evaluation.latency import environment

    figures = [_apart("--one", "model", "--of", name) for name in models]
    if megabytes:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model.onnx")
            _apart("--one", "write", "--of", path, "--onnx-megabytes", str(megabytes))
            figures.append(_apart("--one", "onnx", "--of", path))
    for figure in figures:
        print(", ".join(f"{name} {value}" for name, value in figure.items()))
    known = environment(1)
    print(", ".join(f"{name} {known[name]}" for name in ("processor", "cores") if name in known))
    if out is not None:
        out.write_text(json.dumps({"environment": known, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
