"""The question that somebody asks before machines are rented, and the answer as one value."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from weft.errors import ConfigError
from weft.machines.catalogue import ACCELERATORS, host_of
from weft.machines.host import Machines
from weft.machines.storage import DEPLOYMENTS, bill
from weft.plan.parallelism.guide import Advice, fewest_microbatches, guide
from weft.plan.parallelism.job import Division, Job
from weft.plan.parallelism.memory import usable_bytes
from weft.plan.parallelism.own import Own, price
from weft.plan.parallelism.search import Found, Plan, search
from weft.plan.storage import FileSystem, Given, Serving, given, need_bytes_per_s, serving, smallest
from weft.untrusted import MOST_RANKS

LARGER = ("H200", "B200")
"""Accelerators with more memory than usual ones, in whose place they are tried where nothing fits."""


@dataclass(frozen=True)
class Asked:
    """The question.

    Attributes:
        job: What is trained.
        machines: Where.
        tokens: On how many tokens, if that is known.
        memory_bytes: What of a device may be used; all but what allocators lose if None.
        data_bytes: What an epoch reads, if storage is asked for.
        epoch_s: How long that may take.
        storage_bytes_per_s: What the storage at hand gives all hosts together, if somebody said so.
        division: One to price beside the best, if somebody has one.
    """

    job: Job
    machines: Machines
    tokens: int | None = None
    memory_bytes: int | None = None
    data_bytes: float | None = None
    epoch_s: float | None = None
    storage_bytes_per_s: float | None = None
    division: Division | None = None

    @property
    def limit_bytes(self) -> float:
        """The bytes of a device that training may use."""
        device = self.machines.host.accelerator
        return usable_bytes(device.memory_bytes) if self.memory_bytes is None else self.memory_bytes

    def tokens_per_s(self, plan: Plan) -> float:
        """The tokens that a plan trains on in a second."""
        return self.job.batch * self.job.sizes.seq / plan.seconds

    def share_of_peak(self, plan: Plan) -> float:
        """The model's FLOPs without recomputation over what all devices could do in a step (MFU; Chowdhery et al.,
        arXiv 2204.02311, appendix B)."""
        peak = self.machines.host.accelerator.peak[self.job.precision] * self.machines.size
        return self.job.sizes.model_flops(self.job.batch) / (plan.seconds * peak)

    def hours(self, plan: Plan) -> float | None:
        """The hours of training on all tokens, if their number is known."""
        return None if self.tokens is None else self.tokens / self.tokens_per_s(plan) / 3600

    def cost(self, plan: Plan) -> float | None:
        """The cost of training on all tokens, if a price is known."""
        hours, price = self.hours(plan), self.machines.price_per_hour
        return None if hours is None or price is None else hours * price


@dataclass(frozen=True)
class Answer:
    """The answer.

    Attributes:
        asked: The question.
        search: The divisions.
        guide: What to try, in order.
        runs_today: The fastest plan that weft itself can run, if there is one.
        hosts_that_fit: How many of these hosts something fits on, where nothing fits on those that are there.
        changes: Where nothing fits, the single changes with which something does, with the best plan then; settings
            first, then the fastest.
        own: The division that was asked for.
        microbatches: From which number on the best one's bubble is under 5 %.
        storage: File systems that serve, if storage was asked for: in the first epoch, and in later ones.
        given: Storage whose rate is known, and whether it serves.
        services: What of each storage service serves.
    """

    asked: Asked
    search: Found
    guide: list[Advice]
    runs_today: Plan | None = None
    hosts_that_fit: int | None = None
    microbatches: int = 1
    storage: list[tuple[FileSystem, FileSystem]] = field(default_factory=list)
    given: list[Given] = field(default_factory=list)
    services: list[Serving] = field(default_factory=list)
    changes: list[tuple[str, Plan]] = field(default_factory=list)
    own: Own | None = None


def answer(asked: Asked) -> Answer:
    """Search, guide and storage of a question.

    Raises:
        ConfigError: No division can be at all, whatever the memory.
    """
    job, machines = asked.job, asked.machines
    found = search(job, machines, memory_bytes=asked.memory_bytes)
    if not found.tried:
        why = "; ".join(found.refused)
        raise ConfigError(
            f"{machines.size} accelerators cannot divide this job ({why}): give a batch that they divide, for example "
            f"{divisible(job.batch, machines.size)}"
        )
    storage, rates, services = [], [], []
    hours = asked.hours(found.best[0]) if found.best else None
    run_s = None if hours is None else 3600 * hours
    if asked.data_bytes is not None and asked.epoch_s is not None:
        need = need_bytes_per_s(asked.data_bytes, asked.epoch_s)
        if asked.storage_bytes_per_s is not None:
            rates.append(given("--storage-rate", asked.storage_bytes_per_s, asked.data_bytes, asked.epoch_s))
        if machines.host.storage_bytes_per_s:
            disks = machines.hosts * machines.host.storage_bytes_per_s
            rates.append(
                given(
                    "disks of the hosts", disks, asked.data_bytes, asked.epoch_s,
                    assumed=machines.host.storage_assumed, host_bytes=machines.host.storage_bytes,
                )
            )  # fmt: skip
        for name in DEPLOYMENTS:
            first = smallest(name, asked.data_bytes, asked.epoch_s, first=True)
            later = smallest(name, asked.data_bytes, asked.epoch_s)
            storage.append((_priced(first, asked, run_s), _priced(later, asked, run_s)))
        services = [
            serving(
                service, need, machines.hosts, data_bytes=asked.data_bytes,
                network_bytes_per_s=machines.host.accelerators * machines.host.network.bytes_per_s,
                prices=machines.host.storage_prices, run_s=run_s,
            )
            for service in machines.host.services.values()
        ]  # fmt: skip
    return Answer(
        asked,
        found,
        guide(job, machines, found, asked.limit_bytes),
        found.runs_today,
        None if found.best else _hosts_that_fit(asked),
        fewest_microbatches(job, found.best[0].division, machines) if found.best else 1,
        storage,
        rates,
        services,
        [] if found.best else _changes(asked),
        None if asked.division is None else price(asked.division, job, machines, asked.limit_bytes),
    )


RANK = 16
"""Of the adapters that are proposed where a whole model cannot be trained."""


def _changes(asked: Asked) -> list[tuple[str, Plan]]:
    """Single changes of the job, or of its accelerator, with which something fits; first those that weft runs."""
    job, machines = asked.job, asked.machines
    changed = [
        ("--gradient-bits 16", replace(job, gradient_bytes=2), machines),
        ("--optimizer adam8bit", replace(job, optimizer="adam8bit"), machines),
        ("--offload optimizer", replace(job, offload_optimizer=True), machines),
        ("--offload weights", replace(job, offload_weights=True), machines),
        ("no --unfused-attention", replace(job, fused_attention=True), machines),
    ]
    frozen = "" if job.lora else f"--lora {RANK} "
    adapted = replace(job, lora=job.lora or RANK)
    changed += [
        (frozen.strip(), adapted, machines),
        (f"{frozen}--quantized 4", replace(adapted, quantized=4), machines),
    ]
    for name in LARGER if asked.memory_bytes is None else ():
        device = ACCELERATORS[name]
        if device.memory_bytes > machines.host.accelerator.memory_bytes and job.precision in device.peak:
            host = host_of(name, machines.host.accelerators)
            changed.append(
                (f"{name} in place of {machines.host.accelerator.name}", job, replace(machines, host=host))
            )
    found: list[tuple[bool, int, str, Plan]] = []
    for what, other, there in changed:
        if (other, there) != (job, machines):
            result = search(other, there, memory_bytes=asked.memory_bytes)
            later = result.runs_today is None
            text = f"{what}, which weft does not run today" if later else what
            found += [(later, _kind(what), text, plan) for plan in result.best[:1]]
    found.sort(key=lambda each: (*each[:2], each[3].seconds))
    return [(text, plan) for _, _, text, plan in found]


def _kind(change: str) -> int:
    """Where a change stands: settings first, then what trains less of the model, then other machines."""
    return 1 if "--lora" in change else 0 if change.startswith(("-", "no ")) else 2


def _priced(system: FileSystem, asked: Asked, run_s: float | None) -> FileSystem:
    """A file system with what it costs, if that is known."""
    costs = bill(
        asked.machines.host.storage_prices, system.name, kept_gib=system.capacity_gib, read_bytes=0.0, reads=0.0,
        run_s=run_s, epoch_s=asked.epoch_s,
    )  # fmt: skip
    return replace(system, bill=costs)


def divisible(batch: int, ranks: int) -> int:
    """The next batch that all ranks divide.

    >>> divisible(100, 8), divisible(64, 8)
    (104, 64)
    """
    return -(-batch // ranks) * ranks


def _hosts_that_fit(asked: Asked) -> int | None:
    """The fewest hosts on which something fits; the batch grows where it has to.

    Their number is doubled until something fits, and then halved between that and what did not.
    """
    host = asked.machines.host

    def fits(hosts: int) -> bool:
        machines = Machines(host, hosts)
        job = replace(asked.job, batch=divisible(asked.job.batch, machines.size))
        return bool(search(job, machines, memory_bytes=asked.memory_bytes).best)

    below, above = asked.machines.hosts, 2 * asked.machines.hosts
    while above * host.accelerators <= MOST_RANKS and not fits(above):
        below, above = above, 2 * above
    if above * host.accelerators > MOST_RANKS:
        return None
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if fits(middle) else (middle, above)
    return above
