"""How long work tells what it does: a callback that every verb and every stage takes."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # what is being done, how many of it are done, of how many
