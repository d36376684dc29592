"""Results of a step are no tensors: using one as such is an error that says what to do."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from weft.errors import UsageError


class NoTensorError(UsageError, AttributeError, TypeError):
    """A result of a step was used as a tensor."""


class NotATensor:
    """Refuses all that people do with tensors. ``REMEDY``: what to write instead."""

    REMEDY: ClassVar[str]

    def refuse(self, use: str) -> NoReturn:
        """Raise the error for one use."""
        raise NoTensorError(
            f"{use} is for tensors, and a step returns a StepOutput, one entry for each microbatch: {self.REMEDY}"
        )

    def __format__(self, spec: str) -> str:
        return repr(self) if not spec else self.refuse(f'a format ("{spec}")')


def _refuse(name: str) -> None:
    def refused(self: NotATensor, *args: Any) -> NoReturn:
        self.refuse(name)

    setattr(NotATensor, name, refused)


for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "pow", "neg", "matmul", "lt", "le",
    "gt", "ge", "float", "int", "getitem", "len", "abs", "iter",
):  # fmt: skip
    _refuse(f"__{_name}__")
