"""One decode process over several prefill processes, which a file names."""

from __future__ import annotations

import contextlib
import re
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem.router import free_port
from tests.support.fault_plan import FaultPlan
from tests.support.pair import Pair, PairSettings
from tests.support.processes import ServiceProcess, running, wait_until


@dataclass(kw_only=True)
class Peers(Pair):
    """A pair with more prefill processes; `prefill` is the first of them.

    Attributes:
        prefills: All of them.
        peers_file: Names those that decode may use.
        metrics_port: Of decode.
    """

    prefills: list[ServiceProcess] = field(default_factory=list)
    peers_file: Path
    metrics_port: int

    def write_peers(self, prefills: Sequence[ServiceProcess]) -> None:
        """Replace the file by rename."""
        other = self.peers_file.with_suffix(".new")
        other.write_text(f"prefill-address = {[one.address for one in prefills]}\n")
        other.replace(self.peers_file)

    def metric(self, name: str, prefill: ServiceProcess | None = None) -> float | None:
        """A metric of decode, of one prefill service if given; None if it is not shown."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=5) as reply:
            text = reply.read().decode()
        label = f'address="{prefill.address}"' if prefill is not None else ".*"
        found = re.search(rf"^{name}{{{label}}} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else None

    def is_usable(self, prefill: ServiceProcess) -> bool:
        """Whether decode has a handshake with it."""
        return self.metric("tandem_prefill_peer_usable", prefill) == 1.0

    def wait_usable(self, prefills: Sequence[ServiceProcess]) -> None:
        """Wait until decode has a handshake with each of them."""
        for prefill in prefills:
            wait_until(
                lambda one=prefill: self.is_usable(one),  # type: ignore[misc]  # bound at once
                timeout_s=10,
                what=f"{prefill.address} is usable",
            )


@contextlib.contextmanager
def running_peers(
    model_dir: Path,
    log_dir: Path,
    plans: Sequence[FaultPlan],
    *,
    num_named: int | None = None,
    decode_args: Sequence[str] = (),
) -> Iterator[Peers]:
    """Start one prefill process per plan, and a decode process that may use the first of them.

    Args:
        model_dir: The checkpoint.
        log_dir: Where logs and the file of peers go.
        plans: What each prefill process does wrong.
        num_named: How many of them the file names; None means all.
        decode_args: More flags of decode.
    """
    settings = PairSettings(model_dir=model_dir, chunk_tokens=32)
    with tempfile.TemporaryDirectory(prefix="tandem-kv-") as socket_dir:
        shared = [
            f"--model={settings.model_dir}",
            "--port=0",
            f"--block-size={settings.block_size}",
            f"--num-kv-blocks={settings.num_kv_blocks}",
            f"--max-num-seqs={settings.max_num_seqs}",
            f"--kv-socket-dir={socket_dir}",
        ]
        prefills = [
            ServiceProcess(
                module="tests.support.faulty_prefill",
                args=[*shared, f"--max-num-batched-tokens={settings.chunk_tokens}"],
                log_path=log_dir / f"prefill-{number}.log",
                env=plan.to_env(),
            )
            for number, plan in enumerate(plans)
        ]
        with running(prefills):
            peers_file = log_dir / "peers.toml"
            peers_file.touch()
            metrics_port = free_port()
            decode = ServiceProcess(
                module="decode_service",
                args=[
                    *shared,
                    f"--prefill-peers-file={peers_file}",
                    f"--metrics-port={metrics_port}",
                    *decode_args,
                ],
                log_path=log_dir / "decode.log",
            )
            peers = Peers(
                settings=settings,
                prefill=prefills[0],
                decode=decode,
                prefills=prefills,
                peers_file=peers_file,
                metrics_port=metrics_port,
            )
            named = prefills if num_named is None else prefills[:num_named]
            peers.write_peers(named)
            with running([decode]):
                peers.wait_usable(named)
                yield peers
