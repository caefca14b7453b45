"""How the ranks of a job meet: a torch Store, who is there, and the address at which the root listens.

Note [Meeting]
1. Every rank sets `here/<rank>` to a description of its host.
2. The root (rank 0) waits until all have, compares the hosts, and sets `verdict`: everyone is here, or one error text.
   Everybody else waits for the verdict, so that all ranks raise the same error. Only where the root itself does not
   answer does a rank look for itself who is missing.
3. The root listens on a local address and sets `address` to it and to the job's secret; the others connect.

All keys live below <job>/<restart count>/<generation>: a restarted job, or a second init(), meets on fresh keys.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from . import _jobfile, _launch
from .errors import PeerLostError

DEFAULT_TIMEOUT = 120.0
_LINGER = 2.0  # seconds the root stays, after bad news, for the others to hear it; and a rank for the last one to come

_generation = 0
# The server of a store lives as long as its object: were it dropped, the user's own init_process_group would lose it.
_stores: dict[tuple[str, int], Any] = {}


class MissingRanksError(PeerLostError):
    """Ranks that the launcher promised did not come: `.ranks`, and `.rank` where it is a single one."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = list(ranks)
        self.rank = self.ranks[0] if len(self.ranks) == 1 else None


@dataclass
class Rendezvous:
    """A job whose ranks have all been seen. `store` is private to this job, restart and generation; None when alone."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    launcher: str
    generation: int
    store: Any = None
    deadline: float = field(default=float("inf"), repr=False)
    on_complete: Callable[[], None] = field(default=lambda: None, repr=False)

    def remaining(self) -> float:
        """Seconds left of the start timeout."""
        return max(1.0, self.deadline - time.monotonic())  # who came late still gets a second

    def publish(self, address: str, secret: str) -> None:
        """The root says where it listens."""
        self.store.set("address", json.dumps({"address": address, "secret": secret}))

    def lookup(self) -> tuple[str, str]:
        """(address, secret) of the root. MissingRanksError when it does not say so in time."""
        if not _wait_for(self.store, "address", self.deadline):
            raise MissingRanksError(
                f"rank 0 of {self.size} was seen but did not open its address within the start timeout "
                "(FUSEWIRE_START_TIMEOUT): look for its own error",
                [0],
            )
        answer = json.loads(self.store.get("address"))
        if "error" in answer:
            raise RuntimeError(f"rank 0 could not start: {answer['error']}")
        return answer["address"], answer["secret"]

    def connect(self, core: Any, knobs: dict[str, str]) -> Any:
        """This rank's engine, connected to all others by `core` (the extension module)."""
        if self.size == 1:
            return core.make_in_process_engines(1, knobs)[0]
        if self.rank != 0:
            address, secret = self.lookup()
            return core.connect_unix(address, self.rank, self.size, secret, self.remaining(), knobs)
        secret = secrets.token_hex(32)
        try:
            listener = core.listen_unix(self.size, secret)
        except Exception as error:
            self.store.set("address", json.dumps({"error": str(error)}))
            raise
        self.publish(listener.address, secret)
        return listener.accept_all(self.remaining(), knobs)

    def complete(self) -> None:
        """All ranks are connected; what helped them to meet is removed."""
        self.on_complete()


def start_timeout(timeout: float | None = None) -> float:
    """Seconds to wait for the other ranks: the argument, FUSEWIRE_START_TIMEOUT, or 120."""
    text = os.environ.get("FUSEWIRE_START_TIMEOUT") if timeout is None else timeout
    if text is None:
        return DEFAULT_TIMEOUT
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ValueError(f"FUSEWIRE_START_TIMEOUT={text!r} must be a number of seconds greater than 0")
    return value


def rendezvous(timeout: float | None = None) -> Rendezvous:
    """Meets the other ranks of this job.

    An initialised default group of torch.distributed is the job; else what the launcher's variables say; else this
    process is alone. Returns when every rank has been seen.

    Raises MissingRanksError naming the ranks that did not come within `timeout` seconds (default: the environment's
    FUSEWIRE_START_TIMEOUT, or 120), RuntimeError naming the hosts when there are several, and ValueError for
    launcher's variables that make no sense.
    """
    global _generation
    limit = start_timeout(timeout)
    deadline = time.monotonic() + limit
    place, store = _default_group()
    if place is None:
        place = _launch.detect()
    place = place.completed()
    _generation += 1
    met = Rendezvous(
        place.rank,
        place.size,
        place.local_rank,
        place.local_size,
        place.cross_rank,
        place.cross_size,
        place.launcher.name if place.launcher else "none",
        _generation,
        deadline=deadline,
    )
    if place.size == 1:
        return met
    if store is None:
        store = _open_store(place, met, limit)
    from torch.distributed import PrefixStore

    job = _launch.job_id(place)
    met.store = PrefixStore(f"fusewire/{job}/{_launch.restart_count()}/{met.generation}", store)
    _meet(met, limit)
    return met


def _default_group() -> tuple[_launch.Place | None, Any]:
    """Place and store of torch.distributed's default group, where the user has initialised one."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None, None
    place = _launch.Place(rank=dist.get_rank(), size=dist.get_world_size())
    try:
        told = _launch.detect()
    except ValueError:
        told = None  # the group exists, whatever the variables say
    if told is not None and (told.rank, told.size) == (place.rank, place.size):
        place = told
    return place, dist.distributed_c10d._get_default_store()


def _open_store(place: _launch.Place, met: Rendezvous, limit: float) -> Any:
    from torch.distributed import FileStore

    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host and port:
        return _tcp_store(host, port, place, limit)
    if host or port:
        here, missing = ("MASTER_ADDR", "MASTER_PORT") if host else ("MASTER_PORT", "MASTER_ADDR")
        raise ValueError(f"{here}={host or port} is set but {missing} is not: set both, or neither")
    file = _jobfile.path(place, met.generation)
    store = FileStore(str(file), -1)

    def complete() -> None:
        # The last rank that is done with the file removes it. The others keep their store until they see it gone: the
        # destructor of a FileStore makes the file anew when it is removed between its look and its own last entry.
        if store.add("complete", 1) == place.size:
            file.unlink(missing_ok=True)
        else:
            _wait(lambda: not file.exists(), time.monotonic() + _LINGER)

    met.on_complete = complete
    return store


def _tcp_store(host: str, port: str, place: _launch.Place, limit: float) -> Any:
    from torch.distributed import TCPStore

    number = _launch._number("MASTER_PORT", port, 1, 65535)
    if (host, number) not in _stores:
        # torchrun's agent serves the store itself; elsewhere rank 0 does. multi_tenant: the user's own
        # init_process_group shares the server, whether it comes before or after us.
        serves = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        # TCPStore cannot be interrupted while it connects, and fails with pages of C++ stack: knock first.
        if not serves and not _wait(lambda: _answers(host, number), time.monotonic() + limit):
            raise MissingRanksError(
                f"rank {place.rank} of {place.size} found nobody listening at MASTER_ADDR={host} MASTER_PORT={port} "
                f"within {limit:g} s: rank 0, which opens that address, is missing or has given up (or the address is "
                "not rank 0's). Is every rank running? FUSEWIRE_START_TIMEOUT sets the time",
                [0],
            )
        try:
            _stores[host, number] = TCPStore(
                host,
                number,
                is_master=serves,
                timeout=timedelta(seconds=limit),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except RuntimeError as error:
            deed = "listen at" if serves else "use the store at"
            raise RuntimeError(
                f"rank {place.rank} cannot {deed} MASTER_ADDR={host} MASTER_PORT={port}: {str(error).splitlines()[0]}"
            ) from None
    return _stores[host, number]


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
        return True
    except OSError:
        return False


def _meet(met: Rendezvous, limit: float) -> None:
    try:
        met.store.set(f"here/{met.rank}", json.dumps(_host()))
        if met.rank == 0:
            _judge(met, limit)
        elif not _wait_for(met.store, "verdict", met.deadline + _LINGER):
            raise MissingRanksError(*_missing(met, limit))
        verdict = json.loads(met.store.get("verdict"))
    except MissingRanksError:
        raise
    except RuntimeError as error:  # torch's DistError and its relatives
        raise MissingRanksError(
            f"rank {met.rank} of {met.size} lost the job's store during the start ({error}): rank 0 has probably left",
            [0],
        ) from error
    if met.rank != 0:
        met.store.add("heard", 1)
    if "missing" in verdict:
        raise MissingRanksError(verdict["error"], verdict["missing"])
    if "error" in verdict:
        raise RuntimeError(verdict["error"])


def _judge(met: Rendezvous, limit: float) -> None:
    """The root's part: wait for all, compare the hosts, tell everybody."""
    keys = [f"here/{rank}" for rank in range(met.size)]
    verdict: dict[str, Any] = {}
    if _wait(lambda: met.store.check(keys), met.deadline):
        hosts = [json.loads(met.store.get(key)) for key in keys]
        if any(host != hosts[0] for host in hosts):
            verdict["error"] = _several_hosts(hosts)
    else:
        verdict["error"], verdict["missing"] = _missing(met, limit)
    met.store.set("verdict", json.dumps(verdict))
    if "error" in verdict:
        present = met.size - len(verdict.get("missing", [])) - 1
        _wait(lambda: met.store.add("heard", 0) >= present, time.monotonic() + _LINGER)


def _missing(met: Rendezvous, limit: float) -> tuple[str, list[int]]:
    missing = [rank for rank in range(met.size) if not met.store.check([f"here/{rank}"])]
    if not missing:
        return f"all {met.size} ranks were seen, but rank 0 did not say so within {limit:g} s", [0]
    return (
        f"{_ranks(missing)} of {met.size} did not call fusewire.init() within {limit:g} s ({met.launcher} says that "
        f"this job has {met.size} ranks). Is every rank running, and does each call init()? "
        "FUSEWIRE_START_TIMEOUT sets the time"
    ), missing


def _host() -> dict[str, str]:
    """What must be equal for two processes to reach each other by local sockets and shared memory."""

    def read(link: Callable[[], str]) -> str:
        try:
            return link()
        except OSError:
            return "unknown"

    def boot() -> str:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()

    return {
        "name": socket.gethostname(),
        "boot": read(boot),
        "network": read(lambda: os.readlink("/proc/self/ns/net")),
        "ipc": read(lambda: os.readlink("/proc/self/ns/ipc")),
    }


def _several_hosts(hosts: list[dict[str, str]]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        groups.setdefault(json.dumps(host), []).append(rank)
    named = []
    for text, ranks in groups.items():
        host = json.loads(text)
        twin = any(other["name"] == host["name"] and other != host for other in hosts)
        named.append(f"{host['name']}{' (another container or namespace)' if twin else ''}: {_ranks(ranks)}")
    return (
        f"this version of Fusewire connects the ranks of one host, and these are on {len(groups)}: {'; '.join(named)}. "
        "Start all ranks on one host, in one network namespace"
    )


def _ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0-3, 6" """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


def _wait_for(store: Any, key: str, deadline: float) -> bool:
    return _wait(lambda: store.check([key]), deadline)


def _wait(condition: Callable[[], bool], deadline: float) -> bool:
    """Until `condition()`, looked at ever more rarely, at most every 50 ms: only here, and only while starting.

    Store.wait() would do, but it cannot be interrupted by Ctrl-C and logs a warning when its time is over.
    """
    pause = 0.001
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return True
