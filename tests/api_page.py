"""The page of all names: every public name with its signature and the first paragraph of its docstring.

python -m tests.api_page        # writes `docs/api.md` anew

The sources are read, not imported: no library has to be there, and each version of Python gives the same page.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
START, END = "<!-- names:", "<!-- /names -->"
WIDTH = 120
Definition = ast.FunctionDef | ast.ClassDef


class Group(NamedTuple):
    """Names that belong together.

    Attributes:
        guide: The page that shows how they are used.
        names: Each as `name`, or `Class: method method` with the methods that users call.
        module: Where they are imported from.
        named_only: The guide has a table of what they give.
    """

    title: str
    guide: str
    names: Sequence[str]
    module: str = "weft.torch"
    named_only: bool = False


GROUPS = (
    Group(
        "A job and its steps",
        "getting-started.md",
        [
            "init", "is_initialized", "shutdown", "step", "is_tracing",
            "StepOutput: reduce_mean reduce_sum concat stack",
        ],
    ),
    Group("Notebooks", "launching.md#from-a-notebook", ["notebook_run"]),
    Group(
        "Model and optimizer",
        "getting-started.md",
        [
            "DistributedModel: backward state_dict local_state_dict load_state_dict get_module local_parameters "
            "local_named_parameters local_buffers local_named_buffers local_modules local_named_modules no_sync join "
            "register_comm_hook register_post_partition_hook register_post_step_hook",
            "DistributedOptimizer: step zero_grad state_dict local_state_dict",
            "clip_grad_norm_",
        ],
    ),
    Group(
        "Splitting",
        "splitting.md",
        [
            "partition", "set_partition", "tensor_parallelism", "set_tensor_parallelism",
            "delay_param_initialization", "set_activation_checkpointing", "partition_report",
        ],  # fmt: skip
    ),
    Group("Watching", "jobs.md", ["progress", "log", "on_finding", "recorded_timeline"]),
    Group(
        "Checkpoints",
        "saving.md#single-saves",
        [
            "save_checkpoint", "finish_checkpoint", "resume_from_checkpoint", "export_checkpoint", "read_model",
            "stream_weights", "save", "load",
        ],
    ),
    Group("Restarts", "saving.md", ["checkpoints"]),
    Group(
        "Large batches and mixed precision",
        "recipes.md#large-batches",
        [
            "scale_lr", "WarmUp", "correct_momentum", "global_batch_weight", "decay_groups", "shared_sampler",
            "check_loader", "check_batch", "SyncBatchNorm", "convert_sync_batchnorm", "amp: GradScaler",
        ],
    ),
    Group(
        "Talking between ranks",
        "recipes.md#communication",
        [
            "send", "recv_from", "broadcast", "allgather", "barrier", "mp_barrier", "dp_barrier", "CommGroup",
            "RankType", "WORLD", "PP_GROUP", "RDP_GROUP", "DP_GROUP", "MP_GROUP", "TP_GROUP",
        ],
    ),
    Group(
        "Where a process stands",
        "getting-started.md#where-a-process-stands",
        [
            "rank", "size", "local_rank", "local_size", "pp_rank", "pp_size", "dp_rank", "dp_size", "rdp_rank",
            "rdp_size", "mp_rank", "mp_size", "tp_rank", "tp_size",
            "get_world_group", "get_world_process_group", "get_pp_group", "get_pp_process_group", "get_dp_group",
            "get_dp_process_group", "get_rdp_group", "get_rdp_process_group", "get_mp_group", "get_mp_process_group",
            "get_tp_group", "get_tp_process_group",
        ],
        named_only=True,
    ),
    Group("Lightning", "trainers.md#lightning", ["WeftStrategy"], "weft.integrations.lightning"),
    Group("Fabric", "trainers.md#fabric", ["WeftStrategy"], "weft.integrations.fabric"),
    Group("accelerate", "trainers.md#accelerate", ["Accelerator"], "weft.integrations.accelerate"),
    Group("Hugging Face's Trainer", "trainers.md#hugging-faces-trainer", ["enable"], "weft.integrations.transformers"),
)  # fmt: skip

_KERAS = "weft.tensorflow"
GROUPS_OF_TENSORFLOW = (
    Group(
        "A job and its steps",
        "tensorflow.md",
        [
            "init", "is_initialized", "shutdown", "step", "is_tracing",
            "StepOutput: accumulate reduce_mean reduce_sum concat stack",
        ],
        _KERAS,
    ),
    Group(
        "Model and gradients",
        "tensorflow.md#variables",
        [
            "DistributedModel: all_variables owner_of save_model", "register_post_partition_hook",
            "clip_by_global_norm", "global_norm",
        ],
        _KERAS,
    ),
    Group(
        "Splitting",
        "tensorflow.md#how-the-model-is-split",
        ["partition", "delay_param_initialization", "partition_report"],
        _KERAS,
    ),
    Group("Watching", "jobs.md", ["progress", "log", "on_finding"], _KERAS),
    Group(
        "Checkpoints",
        "saving.md#single-saves-of-keras-models",
        ["save_checkpoint", "finish_checkpoint", "resume_from_checkpoint", "CheckpointManager: save restore"],
        _KERAS,
    ),
    Group("Restarts", "saving.md#with-tensorflow", ["checkpoints"], _KERAS),
    Group("Notebooks", "launching.md#from-a-notebook", ["notebook_run"], _KERAS),
    Group(
        "Talking between ranks",
        "recipes.md#communication",
        [
            "send", "recv_from", "broadcast", "allgather", "barrier", "mp_barrier", "dp_barrier", "CommGroup",
            "RankType", "WORLD", "PP_GROUP", "RDP_GROUP", "DP_GROUP", "MP_GROUP", "TP_GROUP",
        ],
        _KERAS,
    ),
    Group(
        "Where a process stands",
        "getting-started.md#where-a-process-stands",
        [
            "rank", "size", "local_rank", "local_size", "pp_rank", "pp_size", "dp_rank", "dp_size", "rdp_rank",
            "rdp_size", "mp_rank", "mp_size", "tp_rank", "tp_size",
            "get_world_group", "get_pp_group", "get_dp_group", "get_rdp_group", "get_mp_group", "get_tp_group",
        ],
        _KERAS,
    ),
    Group(
        "Data parallelism alone",
        "migration.md#tensorflow",
        [
            "init", "shutdown", "rank", "size", "local_rank", "local_size", "DistributedGradientTape: gradient",
            "DistributedOptimizer", "allreduce", "oob_allreduce", "overlap", "ReduceOp", "Compression", "broadcast",
            "broadcast_variables", "broadcast_global_variables", "BroadcastGlobalVariablesHook",
        ],
        "weft.tensorflow.data_parallel",
    ),
    Group(
        "Callbacks",
        "migration.md#tensorflow",
        ["BroadcastGlobalVariablesCallback"],
        "weft.tensorflow.data_parallel.keras",
    ),
)  # fmt: skip
PAGE = ROOT / "docs" / "api.md"
SECTIONS = {"PyTorch": GROUPS, "TensorFlow": GROUPS_OF_TENSORFLOW}
FRONTENDS = ("weft.torch", "weft.tensorflow")
"""What scripts import as `weft`."""


def source_of(module: str) -> ast.Module:
    path = ROOT / "src" / Path(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def find(module: str, name: str) -> Definition | None:
    """Where a module, or the one that it imports the name from, defines it; None for a module or a value."""
    tree = source_of(module)
    late = [
        each for node in tree.body if isinstance(node, ast.If) for each in node.body
    ]  # imported at first use
    for node in [*tree.body, *late]:
        if isinstance(node, Definition) and node.name == name:
            return _with_what_it_inherits(node, tree)
        if isinstance(node, ast.Assign) and ast.unparse(node) == f"{name} = placement.{name}":
            return find("weft.torch.split.by_hand", name)
        if isinstance(node, ast.ImportFrom) and node.module:
            former = {alias.asname or alias.name: alias.name for alias in node.names}
            if name in former:
                below = ROOT / "src" / Path(*node.module.split("."), former[name]).with_suffix(".py")
                return None if below.exists() else find(node.module, former[name])
    return None


def _with_what_it_inherits(node: Definition, tree: ast.Module) -> Definition:
    """A class with the methods of those base classes that stand in the same file."""
    if isinstance(node, ast.ClassDef):
        bases = {ast.unparse(base) for base in node.bases}
        for each in tree.body:
            if isinstance(each, ast.ClassDef) and each.name in bases:
                node.body += each.body
    return node


def signature(node: Definition) -> str:
    """Parameters with their defaults, without types: ``(a, *, b=1)``."""
    if isinstance(node, ast.ClassDef):
        made = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        return signature(made[0]) if made else ""
    arguments = node.args
    for each in [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]:
        if each is not None:
            each.annotation = None
    arguments.args = [each for each in arguments.args if each.arg != "self"]
    return f"({ast.unparse(arguments)})"


def first_paragraph(node: ast.AST) -> str:
    """As Markdown: reStructuredText's marks become backticks."""
    text = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())  # type: ignore[arg-type]
    return re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text).replace("``", "`")


def item(depth: int, code: str, text: str) -> str:
    indent = " " * (2 * depth)
    return textwrap.fill(
        f"* `{code}`" + (f": {text}" if text else ""), WIDTH, initial_indent=indent, subsequent_indent=indent + "  ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def items(group: Group) -> Iterator[str]:
    for entry in group.names:
        name, _, methods = entry.partition(": ")
        node = find(group.module, name)
        shown = f"weft.{name}" if group.module in FRONTENDS else name
        if node is None:
            yield item(0, *_value(shown, name))
            continue
        values = isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Enum" for base in node.bases)
        yield item(0, shown + ("" if values else signature(node)), first_paragraph(node))
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name in methods.split():
                yield item(1, method.name + signature(method), first_paragraph(method))


def _value(shown: str, name: str) -> tuple[str, str]:
    """A name that is no function or class: a module, or a group."""
    if name == "amp":
        scaler = find("weft.torch.amp", "GradScaler")
        assert scaler is not None
        return f"{shown}.GradScaler{signature(scaler)}", first_paragraph(scaler)
    return shown, f"the same as `weft.CommGroup.{name}`."


def together(lines: Sequence[str], text: str) -> str:
    """The names of several items as one item."""
    return item(0, "`, `".join(line.split("`")[1].partition("(")[0] for line in lines), text)


def names() -> str:
    """All groups as Markdown. What reads as in an earlier section is only named."""
    parts: list[str] = []
    told: set[str] = set()
    for section, groups in SECTIONS.items():
        parts.append(f"## {section}")
        for group in groups:
            note = "" if group.module in FRONTENDS else f"From `{group.module}`. "
            new = [line for line in items(group) if line not in told]
            same = [line for line in items(group) if line in told]
            if same:
                new.append(together(same, "as with PyTorch."))
            elif group.named_only:
                new = [together(new, "in the guide's table.")]
            parts += [
                f"### {group.title}",
                f"{note}Guide: [{group.guide}]({group.guide})",
                "\n".join(new),
            ]
        told |= {line for group in groups for line in items(group)}
    return "\n\n".join(parts)


def filled(page: str) -> str:
    """`page` with the names between its two comments."""
    head, start, rest = page.partition(START)
    note, _, old = rest.partition("\n")
    _, end, tail = old.partition(END)
    return f"{head}{start}{note}\n\n{names()}\n\n{end}{tail}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
