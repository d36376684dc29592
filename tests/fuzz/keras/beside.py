"""Runs the source of a program for Keras in one process and split over the ranks of the job, and tells what differs."""

from __future__ import annotations

import gc
import logging
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import weft.tensorflow as weft
from tests.fuzz.keras.parts import Plain, Split
from tests.fuzz.outcomes import CRASHED, DIFFERS, EQUAL, INVALID, REFUSED, compiled, judged
from weft.errors import WeftError
from weft.tensorflow.session.session import present

Numbers = dict[str, Any]
JOINS_ROWS = "gives other numbers in microbatches than for the whole batch"
"""weft's words for a loss that is no mean over rows: a refusal."""
NO_PROOF = re.compile(r"was not compared with the whole batch: \w+(Error|Exception)\b")
"""weft's words for a comparison that it could not even prepare."""
_without_proof: list[str] = []


def prepare() -> None:
    """Prepare a rank for its first program."""
    log = logging.getLogger("weft")
    log.setLevel(logging.INFO)
    log.addFilter(_note)
    tf.get_logger().setLevel("ERROR")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)


def _note(record: logging.LogRecord) -> bool:
    """Keep what says that a proof failed by itself; only errors are shown."""
    if NO_PROOF.search(record.getMessage()):
        _without_proof.append(record.getMessage())
    return record.levelno >= logging.ERROR


def give_up(text: str) -> None:
    """Tell the other ranks that this one has failed."""
    joined = present()
    if joined is not None and joined.channel is not None:
        joined.channel.abort(text)


def run(names: Mapping[str, Any], way: Any) -> Numbers:
    """The results of the program, and the weights that it ends with."""
    keras.backend.clear_session()
    keras.config.set_floatx(names["DTYPE"])
    keras.utils.set_random_seed(5)
    tf.config.run_functions_eagerly(False)
    found: Numbers = {}
    model = names["script"](way, found)
    for number, variable in way.variables(model):
        found[f"variable {number} ({variable.path.rpartition('/')[2]})"] = np.array(variable)
    return {name: np.asarray(value) for name, value in found.items()}


def differences(mine: Numbers, theirs: Numbers, tolerance: float) -> str:
    """The first difference above rounding; nothing if all is well."""
    told = []
    for name in theirs:
        if name not in mine and not name.startswith("variable "):
            told.append(f"{name} is missing")
    for name, value in mine.items():
        if name not in theirs:
            told.append(f"{name}: one process has none")
            continue
        other = theirs[name]
        if value.shape != other.shape:
            told.append(f"{name}: shape {value.shape}, not {other.shape}")
            continue
        if value.dtype.kind not in "fiub" or other.dtype.kind not in "fiub":
            if not np.array_equal(value, other):
                told.append(f"{name}: {value}, not {other}")
            continue
        value, other = value.astype("float64"), other.astype("float64")
        largest = max(1e-2, float(np.max(np.abs(other), initial=0.0)))
        apart = np.max(np.abs(value - other), initial=0.0) / largest
        if not apart <= tolerance and not np.array_equal(value, other, equal_nan=True):
            told.append(f"{name}: {str(value)[:90]}, not {str(other)[:90]} ({apart:.1e})")
    return "\n".join(told[:8])


def outcome(source: str, settings: Mapping[str, Any]) -> tuple[str, str]:
    """The outcome of a program on this rank, and the words for it."""
    try:
        names = compiled(source)
        gc.collect()  # models of the program before: tensors of their sizes look like their gradients
        expected = run(names, Plain(names["SETTINGS"]["microbatches"]))
        if not all(np.isfinite(each).all() for each in expected.values() if each.dtype.kind == "f"):
            return INVALID, "the numbers are not finite"
    except WeftError:
        return CRASHED, f"without weft: {traceback.format_exc(limit=-14)}"
    except Exception:
        return INVALID, traceback.format_exc(limit=-3)
    finally:
        gc.collect()
        gc.freeze()  # graphs that TensorFlow keeps: Keras collects at the start of every model, and would walk all

    def beside() -> tuple[str, str]:
        _without_proof.clear()
        try:
            weft.init({"partitions": 2, **names["SETTINGS"], **settings})
            actual = run(names, Split())
        except WeftError:
            raise
        except Exception:
            joined = present()
            if joined is not None and isinstance(
                joined.failure, WeftError
            ):  # TensorFlow made an error of its own of it
                raise joined.failure from None
            raise
        found = "\n".join(_without_proof) or differences(actual, expected, names["TOLERANCE"])
        return (DIFFERS, found) if found else (EQUAL, "")

    word, text = judged(beside)
    return (REFUSED, text) if word == DIFFERS and JOINS_ROWS in text else (word, text)


def main(names: dict[str, Any], outcome: Callable[..., tuple[str, str]] = outcome) -> None:
    """Runs the program whose names these are, on the ranks of this job."""
    prepare()
    source = open(names["__file__"]).read()  # noqa: SIM115
    word, text = outcome(source, {})
    print(f"rank {weft.rank() if weft.is_initialized() else '?'}: {word} {text}", flush=True)
    sys.exit(word not in (EQUAL, REFUSED))
