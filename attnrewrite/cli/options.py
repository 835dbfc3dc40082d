"""The options of the commands, in groups: each group is a dataclass and a panel of --help.

A command takes a group as one argument (`parameters.flattened`), the records of attnrewrite.request among them.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from attnrewrite.cli.config import read_config
from attnrewrite.request import Budget, Execution

SourceName = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="The model: a .pt2 or .onnx file, path/file.py:factory, timm:NAME, torchvision:NAME, hf:FOLDER, or a "
        "folder that convert wrote.",
        show_default=False,
    ),
]
Original = Annotated[
    str | None,
    typer.Option(
        metavar="file.py:factory",
        help="The model that a converted folder was made from, if the folder's report may not name it; its weights are "
        "--checkpoint.",
        rich_help_panel="The model",
    ),
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out damaged image files, and name them.")]


@dataclass(frozen=True)
class ModelOptions:
    """How a model is loaded: the keyword arguments of `load_source`."""

    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Weights to load: a .safetensors, .pth, .pt or .bin file; or 'pretrained', to download those that are "
            "published under the model's name.",
        ),
    ] = None
    input_size: Annotated[
        str | None, typer.Option(metavar="CxHxW", help="Channels, height and width of an input, such as 3x224x224.")
    ] = None
    mean: Annotated[
        str | None,
        typer.Option(help="The model reads (x / 255 - mean) / std: one number, or one per channel (0.5,0.5,0.5)."),
    ] = None
    std: Annotated[str | None, typer.Option(help="See --mean.")] = None


@dataclass(frozen=True)
class VariantOptions:
    """Which form replaces attention, and at which sites none does."""

    variant: Annotated[
        str,
        typer.Option(help="Form to replace attention with (see attnrewrite variants), or auto: one for each site."),
    ] = "l1"
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Option of the variant; may be repeated.")
    ] = None
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SITE", help="Site to leave as it is: its id, its name or a pattern (decoder.*); may be repeated."
        ),
    ] = None
    keep_bad: Annotated[
        bool, typer.Option("--keep-bad", help="Leave a site whose check fails as it is, instead of stopping.")
    ] = False


@dataclass(frozen=True)
class OutputOptions:
    """The folder that a command writes."""

    out: Annotated[Path, typer.Option(help="Folder to write, which must not exist yet.", show_default=False)]
    force: Annotated[bool, typer.Option("--force", help="Replace the output folder, if attnrewrite wrote it.")] = False


@dataclass(frozen=True)
class NeuralEngineOptions:
    """What only the target coreml-npu can do."""

    layout: Annotated[
        str | None,
        typer.Option(
            metavar="engine|as-is",
            help="Lay tensors out as the Neural Engine holds them, or leave them as the exporter did.",
            show_default="engine",
        ),
    ] = None
    minimum_target: Annotated[
        str | None,
        typer.Option(metavar="iOS17|iOS18", help="Oldest system that runs the package.", show_default="iOS17"),
    ] = None
    image_input: Annotated[
        bool, typer.Option("--image-input", help="Take images as input, with the preprocessing inside the package.")
    ] = False
    labels: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Answer with the class names in this file, one a line.", show_default=False),
    ] = None
    compress: Annotated[
        str | None,
        typer.Option(
            metavar="int8|palette6|palette4|prune", help="Store the weights in fewer bytes.", show_default=False
        ),
    ] = None


@dataclass(frozen=True)
class CpuOptions:
    """What a CPU is told to compute in, and which one is built for."""

    cpu: Annotated[
        str | None,
        typer.Option(metavar="CORE", help="Core to build for (arm-cpu only).", show_default="cortex-a76"),
    ] = None
    precision: Annotated[
        str | None,
        typer.Option(metavar="fp32|fp16|int8", help="Precision that products are computed in.", show_default="fp32"),
    ] = None


@dataclass(frozen=True)
class CpuBuildOptions(CpuOptions):
    """The same, and the system that the library is loaded under."""

    system: Annotated[
        str | None,
        typer.Option(
            metavar="linux|android|ios", help="System to build for (arm-cpu only).", show_default="the core's usual one"
        ),
    ] = None


@dataclass(frozen=True)
class BoardOptions:
    """A device that is measured on over the network."""

    rpc: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Measure on the device whose TVM RPC server listens here.")
    ] = None
    rpc_timeout: Annotated[
        float | None, typer.Option(help="Seconds that one model may take there.", show_default="120")
    ] = None


@dataclass(frozen=True)
class PhoneOptions:
    """An iPhone that is measured on from the Mac it is connected to."""

    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Measure on the iPhone of this name, as Xcode lists it.")
    ] = None
    development_team: Annotated[
        str | None, typer.Option(metavar="ID", help="Developer team that signs the app which measures there.")
    ] = None
    device_timeout: Annotated[
        float | None, typer.Option(help="Seconds that one model may take there.", show_default="600")
    ] = None


@dataclass(frozen=True)
class RunOptions:
    """How any command runs and what it prints."""

    execution: Execution = field(default_factory=Execution)
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object and nothing else.")] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, say what would be done, write nothing.")
    ] = False
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Read options from a TOML file; those on the command line win.",
            is_eager=True,
            callback=read_config,
        ),
    ] = None
    save_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write this command's options to a file for --config.")
    ] = None


# Under which heading --help lists a group; a group without one is among the command's own options.
PANELS: dict[type, str] = {
    ModelOptions: "The model",
    Budget: "The budget of --variant auto",
    NeuralEngineOptions: "For --target coreml-npu",
    CpuOptions: "For --target host and arm-cpu",
    CpuBuildOptions: "For --target host and arm-cpu",
    BoardOptions: "To measure on a board (host and arm-cpu)",
    PhoneOptions: "To measure on an iPhone (coreml-npu)",
    Execution: "The run",
    RunOptions: "The run",
}
