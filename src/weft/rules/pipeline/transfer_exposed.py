"""Waiting for messages that are on their way."""

from __future__ import annotations

from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.rules.measures import clocks_differ, mean, microbatches, partitions, percent, share
from weft.rules.rule import Finding, Rule
from weft.units import format_seconds


@dataclass(frozen=True)
class TransferExposed(Rule):
    """Do ranks wait for tensors that were sent and have not come yet?

    The measure is the share of a step, the mean over ranks. Transfers beside work do not count.
    """

    explains = ("PipelineBubble", "LowGPUUtilization")

    warn: float = 0.05
    severe: float = 0.15

    def evaluate(self, analysis: Analysis) -> Finding:
        if partitions(analysis) < 2:
            return self.not_applicable("the model is not split")
        if not analysis.messages:
            return self.abstain("no message was recorded with both its ends")
        if error_s := clocks_differ(analysis):
            return self.abstain(
                f"the ranks' clocks may differ by {format_seconds(error_s)}, more than a tenth of a forward pass"
            )
        usual = [message for message in analysis.messages if message.step in analysis.usual_steps]
        exposed = share(analysis, lambda parts: parts.transfer)
        took = mean(message.arrived_s - message.ready_s for message in usual)
        hosts = {analysis.facts(rank).host for rank in analysis.ranks}
        advice = [
            "send activations in half precision: `torch.autocast(..., dtype=torch.bfloat16)` in the step"
        ]
        if len(hosts) > 1:
            advice.insert(0, 'put the ranks of one pipeline on one host: `"placement_strategy": "cluster"`')
        if microbatches(analysis) < 2 * partitions(analysis):
            advice.insert(0, f'send while others work: `"microbatches": {2 * microbatches(analysis)}`')
        return self.graded(
            f"ranks wait for tensors on their way for {percent(exposed)} of a step",
            (exposed, self.warn, self.severe),
            evidence={
                "exposed": percent(exposed),
                "a message takes": format_seconds(took),
                "messages a step": round(len(usual) / max(1, len(analysis.usual_steps))),
                "hosts": len(hosts),
            },
            advice=advice,
            gain=analysis.what_if.gain("no transfers"),
            ranks=analysis.ranks,
        )
