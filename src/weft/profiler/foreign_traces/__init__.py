"""Reads what another profiler wrote: traces of `torch.profiler` become a run."""

from weft.profiler.foreign_traces.folder import is_traces as is_traces
from weft.profiler.foreign_traces.folder import read_traces as read_traces
