"""The images that a command is given, and what of them is left out."""

from typing import Annotated, Any

import typer

SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out damaged image files, and name them.")]


def read_images(data: str, skip_bad: bool) -> Any:
    """The images of a folder or an .npz; those left out as damaged are counted and named on standard error."""
    from attnrewrite.images.dataset import load_images
    from attnrewrite.images.decode import named

    images = load_images(data, skip_bad)
    if images.skipped:
        count = f"{len(images.skipped)} of {len(images.skipped) + len(images)}"
        typer.echo(f"attnrewrite: {data}: {count} images are damaged and left out: {named(images.skipped)}", err=True)
    return images
