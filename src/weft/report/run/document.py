"""A run as JSON, in a form that stays: new fields may come, those that are there keep their meaning."""

from __future__ import annotations

import json
import math
from typing import Any

from weft.analysis.compare import Comparison
from weft.analysis.plan.comparison import BesidePlan, Term
from weft.analysis.scaling import Scaling
from weft.report.run.report import Report
from weft.rules.rule import Finding

VERSION = 1


def run_json(report: Report) -> str:
    """Figures in seconds, bytes and shares of 1; what is not known or not finite is null."""
    return json.dumps(_plain(run_document(report)), indent=1, allow_nan=False)


def run_document(report: Report) -> dict[str, Any]:
    """The value that `run_json` writes, before it is text."""
    analysis, run, verdict = report.analysis, report.analysis.run, report.verdict
    return {
        "weft": "report",
        "version": VERSION,
        "run": run.name,
        "complete": run.complete,
        "warnings": list(run.warnings),
        "ranks": list(run.ranks),
        "clock_error_s": run.clock_error_s,
        "fidelity": analysis.what_if.fidelity,
        "verdict": {
            "text": verdict.text,
            "status": verdict.status.name,
            "rule": verdict.finding.rule if verdict.finding is not None else None,
        },
        "findings": [_finding(each) for each in report.findings],
        "steps": {
            "trained": len(report.step_times),
            "recorded": len(analysis.timeline.steps),
            "usual": len(analysis.usual_steps),
            "median_s": report.median_step_s,
            "period_s": analysis.step_s,
            "outliers": report.outliers,
        },
        "parts_s": {str(rank): parts._asdict() for rank, parts in analysis.typical.items()},
        "tensor_parallel_s": {
            str(rank): {str(period.step): parts.tensor for period, parts in analysis.parts[rank].items()}
            for rank in analysis.ranks
            if any(parts.tensor for parts in analysis.parts[rank].values())
        },
        "waits_s": [
            {"rank": rank, "for": peer, "seconds": seconds}
            for (rank, peer), seconds in sorted(analysis.waits.items())
        ],
        "what_if": [
            {"change": change.name, "step_s": change.step_s, "gain": change.gain, "line": change.line}
            for change in analysis.what_if.changes
        ],
        "plan": _plan(report.plan) if report.plan is not None else None,
        "comparison": _comparison(report.comparison) if report.comparison is not None else None,
        "scaling": _scaling(report.scaling) if report.scaling is not None else None,
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "text": comparison.text,
        "step_s": {"before": comparison.step.old_s, "now": comparison.step.new_s},
        "parts_s": {each.part: {"before": each.old_s, "now": each.new_s} for each in comparison.parts},
        "cause": comparison.cause.part if comparison.cause is not None else None,
        "rank": comparison.rank,
        "settings": {each.name: {"before": each.old, "now": each.new} for each in comparison.settings},
    }


def _plan(plan: BesidePlan) -> dict[str, Any]:
    def row(term: Term) -> dict[str, Any]:
        return {
            "what": term.name, "partition": term.partition, "planned": term.planned, "measured": term.measured,
        }  # fmt: skip

    return {
        "text": plan.text,
        "source": plan.source,
        "step_s": {"planned": plan.step.planned, "measured": plan.step.measured},
        "terms_s": [row(term) for term in plan.terms],
        "memory_bytes": [row(term) for term in plan.memory],
        "missed": row(plan.missed) if plan.missed is not None else None,
    }


def _scaling(scaling: Scaling) -> dict[str, Any]:
    return {
        "text": scaling.text,
        "limit": scaling.limit,
        "runs": [
            {
                "run": row.name,
                "ranks": row.ranks,
                "step_s": row.step_s,
                "samples_s": row.samples_s,
                "linear": row.linear,
                "efficiency": row.efficiency,
                "lost": dict(row.lost),
            }
            for row in scaling.rows
        ],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "status": finding.status.name,
        "text": finding.text,
        "evidence": dict(finding.evidence),
        "advice": list(finding.advice),
        "gain": finding.gain,
        "ranks": list(finding.ranks),
        "steps": list(finding.steps),
        "explained_by": finding.explained_by or None,
    }


def _plain(value: Any) -> Any:
    """The same for JSON, which knows neither nan nor anything but text, numbers, lists and tables."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)
