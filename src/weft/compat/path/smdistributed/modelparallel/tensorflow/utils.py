"""Functions for scripts that gather checkpoints of several machines."""

from typing import Any, NoReturn

from weft.compat.refused import refuse_checkpoint_files


def send_checkpoint_files(root: str, dest: Any) -> NoReturn:
    """Refused: see the error."""
    refuse_checkpoint_files("send_checkpoint_files")


def receive_checkpoint_files(root: str, src: Any) -> NoReturn:
    """Refused: see the error."""
    refuse_checkpoint_files("receive_checkpoint_files")
