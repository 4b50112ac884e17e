"""vcasgd as a contender with slow links: machines that join over one outgoing connection."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure.goodput_run import Fleet
from common import CNN
from entrants import Entrant
from links import Links, Place
from ours import OurCluster
from outcomes import Workload
from vcasgd.schemas.fleet import Machine, MachineState
from vcasgd.settings import Settings
from vcasgd.spec.access import Scope
from vcasgd.stack.layout import GATEWAY

POOL = "joined"
#: Text before the machine's name in the output of an agent.
JOINED = "joined as "
STOP_SECONDS = 10.0
CODEC = "int2"


class JoinedCluster(OurCluster):
    """A stack on the fast side of the links, with machines that join it by ``vcasgd join``."""

    def __init__(
        self, workload: Workload, folder: Path, data: Path, entrant: Entrant, links: Links
    ) -> None:
        super().__init__(workload, folder, data, entrant, 0)
        self._links = links

    def _choose_settings(self) -> Settings:
        pools = self._folder / "pools.yaml"
        pools.write_text(f"pools: [{{name: {POOL}, provider: join}}]\n")
        return Settings(
            home=self._folder / "home",
            api_port=0,
            pools=pools,
            join_port=0,
            join_host=self._links.hub,
        )

    def _open_fleet(self) -> Fleet:
        token = self._client.create_token("race", Scope.JOIN, pool=POOL).token
        url = f"https://{self._links.hub}:{self._state.ports[GATEWAY]}"
        agents = Agents(url, token, self._folder / "agents")
        self._resources.callback(agents.close)
        for _ in range(self._workload.workers):
            agents.start(self._links.place())
        return agents

    def _update(self) -> dict[str, Any]:
        # What the event `slow-link` of such a job says.
        return {} if self._workload.model == CNN else {"update": {"codec": CODEC}}

    def contributors(self) -> list[str]:
        """Return the machines that have changed the model."""
        lives = list(self._observer.seen.machines.items())
        return sorted(name for name, life in lives if life.pushed is not None)


@dataclass(frozen=True)
class _Agent:
    process: subprocess.Popen[bytes]
    log: Path
    launched: float


class Agents:
    """Processes of ``vcasgd join``."""

    def __init__(self, url: str, token: str, folder: Path) -> None:
        self._url, self._token, self._folder = url, token, folder
        self._agents: list[_Agent] = []
        folder.mkdir()

    def start(self, place: Place) -> None:
        """Start one in a place of its own."""
        log = self._folder / f"{len(self._agents)}.log"
        # Its job reads the data and writes when it began, both outside of its own folder.
        argv = [sys.executable, "-m", "vcasgd.cli", "join", self._url, "--sandbox", "off"]
        environment = {**os.environ, "VCASGD_TOKEN": self._token, "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                place.command(argv), stdout=output, stderr=output, env=environment
            )
        self._agents.append(_Agent(process, log, time.time()))

    def machines(self) -> list[Machine]:
        """Return the machines that have joined and live."""
        return [
            Machine(
                id=name,
                pool=POOL,
                state=MachineState.RUNNING,
                launched_at=agent.launched,
                notice_at=None,
                host="",
                price_per_hour=0.0,
                spot=True,
            )
            for agent in self._agents
            if agent.process.poll() is None and (name := _name(agent.log))
        ]

    def close(self) -> None:
        for agent in self._agents:
            agent.process.terminate()
        for agent in self._agents:
            with suppress(subprocess.TimeoutExpired):
                agent.process.wait(STOP_SECONDS)
            agent.process.kill()
            agent.process.wait()


def _name(log: Path) -> str:
    """Return the name under which an agent has joined, or an empty string."""
    _, _, rest = log.read_text(errors="replace").partition(JOINED)
    return rest.partition(",")[0]
