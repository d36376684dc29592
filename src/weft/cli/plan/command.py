"""The options of `weft plan`, and what is made of them."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.cli.draw import wrote
from weft.cli.options import count, read_graph
from weft.cli.plan.calibrate import check_options, run_calibration
from weft.cli.plan.measure import measure
from weft.cli.plan.page import report_of
from weft.cli.plan.storage_tables import add_prices
from weft.cli.plan.text import as_json, as_text, nothing_fits
from weft.cli.plan.traced import limit_of, plans_of, traced_json, traced_report, traced_text
from weft.errors import ConfigError, PlacementError, UsageError
from weft.graph.experts import Experts
from weft.graph.hugging_face import EXPERTS, parts_left_out, sizes_from_config
from weft.graph.sizes import Sizes
from weft.machines.accelerator import DTYPES
from weft.machines.cluster import EXAMPLE
from weft.machines.host import Host, Machines
from weft.machines.machine_file import parse_machines
from weft.machines.storage import with_prices
from weft.plan.parallelism.answer import Asked, answer
from weft.plan.parallelism.job import STATES, Job
from weft.plan.parallelism.own import DIVISION, parse_division
from weft.report.plan.page import PlanReport, plan_page
from weft.units import parse_bytes, parse_rate, parse_seconds
from weft.untrusted import read_file, shown_path, shown_text, whole

_EXAMPLES = """\
examples:
  weft plan --cluster 8x8xH100 --config config.json --global-batch 512 --tokens 300B
  weft plan --cluster 4x8xA100-80 --layers 40 --hidden 5120 --heads 40 --ffn 13824 --gated --vocab 32000 --seq 4096 \\
      --global-batch 1024 --compare
  weft plan gpt.graph.json --cluster 2x8xA100-80 --global-batch 64
  weft plan --measure mine.json -n 8
  weft plan --calibrate out --machine mine.json --config config.json
  weft plan --cluster 4xp4d.24xlarge --price 20 --config config.json --global-batch 256 --data 100GB --epoch 30s
"""
COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="how to divide a model over machines, and what it takes",
        description="Takes a transformer by its sizes and machines by their names, tries every way to divide the one "
        "over the others, and says which is the fastest, what the rest lack, and what to write.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "graph", nargs="?", metavar="GRAPH",
        help="a traced model (weft trace), in place of the model's options; the batch then counts its microbatches",
    )  # fmt: skip
    parser.add_argument(
        "--cluster", metavar="MACHINES",
        help=f"HOSTSxEACHxACCELERATOR ({EXAMPLE}), HOSTSxINSTANCE (4xp4d.24xlarge) or HOSTSxFILE.json",
    )  # fmt: skip
    parser.add_argument(
        "--measure", metavar="FILE.json", help="plan nothing: measure this machine, and write a file for --cluster"
    )  # fmt: skip
    parser.add_argument(
        "-n", "--ranks", type=count,  metavar="N", help="with --measure: ranks at once (default: 1)"
    )  # fmt: skip
    parser.add_argument(
        "--calibrate", metavar="OUT", nargs="+",
        help="plan nothing: correct a machine by recordings of runs of the model that the options give",
    )  # fmt: skip
    parser.add_argument(
        "--machine", metavar="FILE.json",
        help="with --calibrate: the machine's file, which is corrected; of the machine in --cluster, if that is given",
    )  # fmt: skip
    _add_model(parser)
    _add_training(parser)
    parser.add_argument(
        "--compare", action="store_true", help="the best of each kind, and what to try in which order"
    )
    parser.add_argument("--explain", action="store_true", help="each term of the best one's step and memory")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--html", metavar="FILE", help="write a page with everything, and with pictures")
    parser.set_defaults(handler=main)


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the model")
    group.add_argument(
        "--config", metavar="FILE", help="a config.json of Hugging Face; options below win over it"
    )
    for name, meaning in (
        ("layers", "blocks"),
        ("hidden", "width of the residual stream"),
        ("heads", "attention heads"),
        ("kv-heads", "heads of keys and values (default: as many as heads)"),
        ("ffn", "width of the feed-forward layer (default: 4 x hidden)"),
        ("vocab", "tokens that there are"),
        ("seq", "tokens of a sequence"),
    ):
        group.add_argument(f"--{name}", type=_count, metavar="N", help=meaning)
    for name, meaning in (
        ("experts", "experts of a layer, in place of one feed-forward layer"),
        ("experts-per-token", "how many of them a token goes to"),
        ("expert-ffn", "width of an expert (default: --ffn)"),
        ("shared-ffn", "width of the experts that all tokens go to, together"),
        ("dense-layers", "layers without experts, the first ones"),
    ):
        group.add_argument(f"--{name}", type=_count_or_none, metavar="N", help=meaning)
    group.add_argument(
        "--window", type=_count_or_none, metavar="N",
        help="tokens that a query sees at most, in every layer; 0: all (default: as the config.json has it)",
    )  # fmt: skip
    group.add_argument(
        "--gated", action="store_true", help="feed-forward layers have a gate (SwiGLU), as in Llama"
    )
    group.add_argument("--untied", action="store_true", help="embedding and head have a matrix each")


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the training")
    group.add_argument("--global-batch", type=_count, metavar="N", help="sequences of a step, in all")
    group.add_argument("--tokens", type=_count, metavar="N", help="tokens to train on, for example 300B")
    group.add_argument(
        "--precision", choices=DTYPES, help="dtype of matmuls (default: bf16, or fp16 or fp32 without it)"
    )
    group.add_argument("--optimizer", choices=list(STATES), default="adam", help="(default: adam)")
    group.add_argument(
        "--gradient-bits", type=int, choices=(16, 32), default=32,
        help="of a gradient as it is summed and averaged (default: 32)",
    )  # fmt: skip
    group.add_argument(
        "--lora",
        type=_count,
        metavar="RANK",
        help="train adapters of this rank on all linears of a frozen model",
    )
    group.add_argument(
        "--quantized",
        type=int,
        choices=(8, 4),
        help="with --lora: bits of the frozen linears (NF4: 4.5 with scales)",
    )
    group.add_argument(
        "--offload",
        choices=("optimizer", "weights"),
        action="append",
        default=[],
        help="the optimizer's states, or weights, wait in host memory; may be given twice",
    )
    group.add_argument(
        "--unfused-attention", action="store_true", help="attention writes its scores into memory"
    )
    group.add_argument(
        "--eager",
        action="store_true",
        help="operations between products are kernels of their own (no torch.compile)",
    )
    group.add_argument(
        "--division", metavar="PARTS", help=f"price this division, too, beside the best one: {DIVISION}"
    )
    group.add_argument("--price", type=float, metavar="P", help="what a host costs an hour, in any currency")
    group.add_argument("--memory", metavar="SIZE", help="what of a device may be used (default: 96 %% of it)")
    add_prices(group)
    group.add_argument("--data", metavar="SIZE", help="what an epoch reads, for example 100GB")
    group.add_argument("--epoch", metavar="TIME", help="how long an epoch may take to read, for example 30s")
    group.add_argument(
        "--storage-rate", metavar="RATE", help="what storage that you have gives all hosts together: 3GB/s"
    )


def _count(text: str) -> int:
    """A whole number, which may end in K, M, B or T."""
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    value = whole(text[: len(text) - len(unit)]) if unit in COUNTS else None
    if not value:
        raise argparse.ArgumentTypeError(
            f"'{shown_text(text)}' is no whole number above 0, such as 2048 or 300B"
        )
    return value * COUNTS[unit]


def _count_or_none(text: str) -> int:
    """A whole number, or 0."""
    return 0 if text == "0" else _count(text)


def main(options: argparse.Namespace) -> int:
    if options.calibrate is not None:
        check_options(options)
        run_calibration(options, lambda host, batch: _job(options, host, batch))
        return 0
    if options.measure is not None:
        measure(Path(options.measure), 1 if options.ranks is None else options.ranks)
        return 0
    if options.machine is not None:
        raise UsageError(
            "--machine is the file that --calibrate corrects; a plan takes it as --cluster 1xFILE.json"
        )
    if options.ranks is not None:
        raise UsageError(
            "-n says with how many ranks --measure measures; a plan takes its ranks from --cluster"
        )
    missing = [name for name in ("cluster", "global_batch") if getattr(options, name) is None]
    if missing:
        raise UsageError(
            f"a plan needs {' and '.join('--' + name.replace('_', '-') for name in missing)}, for example --cluster "
            "4x8xA100-80 --global-batch 512"
        )
    if options.graph is not None:
        _refuse_of_sizes(options)
        _plan_traced(options)
        return 0
    found = answer(_asked(options))
    as_asked = (
        json.dumps(as_json(found), indent=2)
        if options.json
        else as_text(found, options.compare, options.explain)
    )
    print(as_asked)
    if options.html is not None:
        _write_page(options.html, report_of(found))
    if not found.search.best:
        raise PlacementError(nothing_fits(found))
    return 0


def _refuse_of_sizes(options: argparse.Namespace) -> None:
    """A traced model has its sizes, times and states; options that say others are refused."""
    own = {
        "command",
        "handler",
        "graph",
        "cluster",
        "global_batch",
        "memory",
        "json",
        "html",
        "measure",
        "calibrate",
        "machine",
        "ranks",
    }
    given = [
        f"--{name.replace('_', '-')}"
        for name, value in vars(options).items()
        if name not in own and value not in (None, False, "adam", 32, [])
    ]
    if given:
        raise UsageError(
            f"{shown_path(options.graph)} is a traced model, of which {', '.join(given)} can say nothing: leave "
            f"{'it' if len(given) == 1 else 'them'} out, or the file"
        )


def _machines(options: argparse.Namespace) -> Machines:
    machines = parse_machines(options.cluster)
    host = machines.host
    prices = with_prices(host.storage_prices, options.storage_price)
    price = host.price_per_hour if options.price is None else options.price
    return replace(machines, host=replace(host, price_per_hour=price, storage_prices=prices))


def _asked(options: argparse.Namespace) -> Asked:
    machines = _machines(options)
    if (options.data is None) != (options.epoch is None):
        raise UsageError("--data and --epoch belong together: --data 100GB --epoch 30s")
    if options.storage_rate is not None and options.data is None:
        raise UsageError(
            "--storage-rate says what storage gives; what it must give say --data and --epoch: --data 100GB --epoch 30s"
        )
    if options.storage_price and options.data is None:
        raise UsageError(
            "--storage-price says what storage costs; how much is needed say --data and --epoch: --data 100GB "
            "--epoch 30s"
        )
    job = _job(options, machines.host, options.global_batch)
    return Asked(
        job,
        machines,
        options.tokens,
        None if options.memory is None else parse_bytes(options.memory),
        None if options.data is None else parse_bytes(options.data),
        None if options.epoch is None else parse_seconds(options.epoch),
        None if options.storage_rate is None else _rate(options.storage_rate),
        None if options.division is None else parse_division(options.division, job, machines),
    )


def _rate(text: str) -> float:
    """Bytes a second, above 0."""
    rate = parse_rate(text)
    if not 0 < rate < math.inf:
        raise UsageError(f"--storage-rate is {shown_text(text)}, it must be above 0: 3GB/s")
    return rate


def _job(options: argparse.Namespace, host: Host, batch: int) -> Job:
    peak = host.accelerator.peak
    precision = options.precision or next(dtype for dtype in ("bf16", "fp16", *DTYPES) if dtype in peak)
    if precision not in peak:
        raise ConfigError(
            f"{host.accelerator.name} has no products in {precision}: write --precision {' or '.join(peak)}"
        )
    return Job(
        _sizes(options), batch, precision, options.optimizer,
        fused_attention=not options.unfused_attention, gradient_bytes=options.gradient_bits // 8, eager=options.eager,
        lora=options.lora or 0, quantized=options.quantized or 0, offload_optimizer="optimizer" in options.offload,
        offload_weights="weights" in options.offload,
    )  # fmt: skip


def _sizes(options: argparse.Namespace) -> Sizes:
    names = ("layers", "hidden", "heads", "ffn", "vocab", "seq", "kv_heads")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    experts = {name: value for name in EXPERTS if (value := getattr(options, name)) is not None}
    if options.config is not None:
        found = read_file(options.config, lambda text: sizes_from_config(text, **given, **experts))
        left_out = ", ".join(read_file(options.config, parts_left_out))
        if left_out:
            print(f"weft plan: the text model is planned; {left_out} is not counted", file=sys.stderr)
        gated, tied = options.gated or found.gated, found.tied and not options.untied
        return _with_window(replace(found, gated=gated, tied=tied), options.window)
    missing = [name for name in ("layers", "hidden", "heads", "vocab", "seq") if name not in given]
    if missing:
        raise ConfigError(
            f"the model lacks {', '.join(f'--{name}' for name in missing)}: give them, or --config config.json"
        )
    ffn = given.pop("ffn", 4 * given["hidden"])
    found = Sizes(
        **given, ffn=ffn, gated=options.gated, tied=not options.untied, experts=_experts(experts, ffn)
    )
    return _with_window(found, options.window)


def _with_window(sizes: Sizes, window: int | None) -> Sizes:
    """The sizes with a window in every layer, if one is given."""
    if window is None:
        return sizes
    return replace(sizes, window=window, windowed=sizes.layers if window else 0, chunked=False)


def _experts(given: dict[str, int], ffn: int) -> Experts | None:
    """The experts that options describe."""
    if not given:
        return None
    lacking = [name for name in ("experts", "experts_per_token") if name not in given]
    if lacking:
        raise ConfigError(
            f"a mixture of experts lacks {' and '.join('--' + name.replace('_', '-') for name in lacking)}: "
            "--experts 8 --experts-per-token 2"
        )
    return Experts(
        given["experts"], given["experts_per_token"], given.get("expert_ffn", ffn), given.get("shared_ffn", 0),
        given.get("dense_layers", 0),
    )  # fmt: skip


def _plan_traced(options: argparse.Namespace) -> None:
    graph, machines = read_graph(options.graph), _machines(options)
    limit = limit_of(machines, None if options.memory is None else parse_bytes(options.memory))
    found = plans_of(graph, machines, options.global_batch, limit)
    print(json.dumps(traced_json(found), indent=2) if options.json else traced_text(found, machines, graph))
    if options.html is not None:
        _write_page(options.html, traced_report(found, machines, graph, limit))


def _write_page(out: str, report: PlanReport) -> None:
    """Write a page; a line says so, except with `--json`."""
    print(wrote(Path(out), plan_page(report)), file=sys.stderr)
