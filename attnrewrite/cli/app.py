"""The application that commands register with: options from dataclasses, one outcome printed in one place."""

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from attnrewrite import __version__
from attnrewrite.cli.config import save_config
from attnrewrite.cli.output import Outcome, results_alone, show
from attnrewrite.cli.parameters import flattened
from attnrewrite.outputs import reserved

app = typer.Typer(
    name="attnrewrite",
    help="Rewrite the attention of trained vision transformers, repair the accuracy, and lower the result.\n\n"
    "A model is a .pt2 or .onnx file, path/file.py:factory, timm:NAME, torchvision:NAME, hf:FOLDER, "
    "or a folder that convert wrote; explain and lower also take a .mlpackage.",
    epilog="Start with: attnrewrite explain timm:vit_tiny_patch16_224",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command(example: str) -> Callable[[Callable[..., Outcome]], Callable[..., Outcome]]:
    """Make a function that returns an Outcome a command; its dataclass parameters become options."""

    def register(function: Callable[..., Outcome]) -> Callable[..., Outcome]:
        flat = flattened(function)

        def invoke(context: typer.Context, **values: Any) -> int:
            from attnrewrite.calibration.processes import first_process

            if values["save_config"] is not None:
                save_config(context, values["save_config"])
            with ExitStack() as held:
                if "out" in values and not values["dry_run"] and first_process():
                    held.enter_context(reserved(values["out"], force=values["force"] or values.get("resume", False)))
                with results_alone():
                    outcome = flat(**values)
            if first_process():
                show(outcome, as_json=values["json"])
            return outcome.exit_code

        signature = inspect.signature(flat)
        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        invoke.__signature__ = signature.replace(parameters=[context, *signature.parameters.values()])  # type: ignore[attr-defined]
        invoke.__annotations__ = {"context": typer.Context} | flat.__annotations__
        app.command(name=function.__name__, help=inspect.getdoc(function), epilog=f"Example: {example}")(invoke)
        return function

    return register


@app.callback(invoke_without_command=True)
def about(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        print(f"attnrewrite {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())
