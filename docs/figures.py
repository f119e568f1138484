"""Figures, pictures and quoted output of the hand-written pages. `make figures` records them anew in docs/figures/:

- `bench.txt` is what `make bench` printed, and `bench.json` has the results of several runs of it;
- `NAME.kvrec` is a recording of a fleet of `kvctl demo` in the scene NAME, redacted and without what no page shows.


`make docs` writes what the current code prints for them into the pages and into pictures of terminals (`TERMINALS`),
and a test compares. Pages have them as commands in blocks of code with their output, if a command reads a recording
(`--from docs/figures/NAME.kvrec`), is `make bench`, or has an output that tests keep (`GOLDEN`); and as figures between
`<!-- bench: NAME -->` and `<!-- -->`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from kvctl.cli import run
from kvctl.client import recordings
from kvctl.client.health_reads import HEALTH_CALLS
from kvctl.client.recorder import write_snapshots
from kvctl.client.recordings import RecordedAgent, RecordedSnapshot, RecordingSource, SnapshotReader
from kvctl.client.redaction import Redaction
from kvctl.commands import output as command_output
from kvctl.health.engine import HealthWatch
from kvctl.tui.app import TopApp
from kvctl.tui.feed import Deliver, Feed, Question, Reading
from kvctl.tui.frame import Mode
from kvctl.tui.palette import style as style_of
from kvctl.tui.snapshot import picture as svg_of
from kvctl.tui.snapshot import svg

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"
# Output that needs hardware or a fleet that is not here: files with which tests compare it.
GOLDEN = {
    "kvctl nics": "tests/kvctl/commands/golden/nics-120.txt",
    "kvctl status": "tests/kvctl/commands/golden/status-hosts-120.txt",
    "curl http://127.0.0.1:9400/readyz": "tests/kvctl_agent/observer/readyz-draining.txt",
}
PICTURE, PICTURE_SIZE = "stuck-room", (120, 26)
# Pictures of terminals: file and what is typed, for a room in place of ROOM; at most so many lines of it.
TERMINALS = {
    "figures/doctor.svg": ("kvctl doctor --from docs/figures/stuck-room.kvrec", 20),
    "figures/room.svg": ("kvctl rooms show ROOM --from docs/figures/stuck-room.kvrec", 20),
}
WIDTH = 100
RUNS = 3  # of the benchmark
# Answers of agents that no page shows; they are most of a recording. Curves need few.
LEFT_OUT = frozenset({"stacks", "commands", "nics", "slow"})
OF_CURVES = frozenset({"hello", "status"})
_BLOCK = re.compile(r"^```\n(\$ .*?)^```$", re.MULTILINE | re.DOTALL)
_BENCH = re.compile(r"(<!-- bench: (\w+) -->).*?(<!-- -->)", re.DOTALL)
# A room of a recording; its number is another one in the next recording.
_SHOW = re.compile(r"(\$ kvctl rooms show )\d+( --from (\S+).*)")
_MEASURE = "kvctl bench --prefill-tp 4 --decode-dp 4"
_ANSI = ("dim", "red", "green", "yellow", "blue", "magenta", "cyan", "")  # names of a palette's colours


class Scene(NamedTuple):
    """A fleet of `kvctl demo` to record.

    Attributes:
        options: of `kvctl demo`.
        until: health code that is waited for; "" for none.
        after_s: time from then, or from the start, until the recording begins.
        for_s: time that the recording covers, with a snapshot per second; 0 for one snapshot.
        action: command of kvctl that is run then, after which `NAME-after.kvrec` is recorded; `{}` is the allocation
            that the code is about.
    """

    options: str
    until: str = ""
    after_s: float = 10
    for_s: int = 0
    action: str = ""


SCENES = {
    "healthy": Scene("", after_s=20),
    "dead-peer": Scene("--fault dead-peer", "KV_PEER_LOST"),
    "stuck-room": Scene("--fault stuck-room", "KV_ROOM_STUCK_TRANSFER", 0, 40),
    "failed-rooms": Scene("--fault pause=prefill-0@4s+22s", "KV_PEER_LOST", 20),
    "pinned-ring": Scene("--fault pinned-ring", "KV_RING_PINNED", action="staging release {} -y"),
    "slow-layer": Scene("--fault slow-layer", "KV_LANE_SLOW", 5),
    "corrupt": Scene("--fault corrupt", "KV_CHECKSUM_MISMATCH", 5),
}


# ---- what the pages show -------------------------------------------------------------------------------------------


def filled(page: str) -> str:
    """Returns a page with the output of its commands and the figures of the benchmark as they are now.

    Raises:
        ValueError: a page quotes output that nothing here prints.
    """
    page = _BLOCK.sub(lambda block: f"```\n{_filled_block(block[1])}```", page)
    return _BENCH.sub(lambda figure: figure[1] + bench_figures()[figure[2]] + figure[3], page)


def _filled_block(block: str) -> str:
    parts = []
    for part in re.split(r"^(?=\$ )", block, flags=re.MULTILINE)[1:]:
        command, _, quoted = part.partition("\n")
        command = _SHOW.sub(lambda found: found[1] + _oldest_room(found[3]) + found[2], command)
        shown = printed(command.removeprefix("$ "))
        if shown is None and quoted.strip():
            raise ValueError(f"nothing prints what a page quotes below {command}")
        parts.append(f"{command}\n{(quoted if shown is None else shown).rstrip()}".rstrip())
    apart = "\n\n" if any("\n" in part for part in parts) else "\n"
    return apart.join(parts) + "\n"


@cache
def _oldest_room(recording: str) -> str:
    return _output(f"kvctl rooms --sort-by -age --columns room -o tsv --from {recording}").splitlines()[1]


@cache
def printed(command: str) -> str | None:
    """Returns the output of a command on a page; None if it has none there."""
    if command == "make bench":
        return (FIGURES / "bench.txt").read_text()
    if command in GOLDEN:
        return (ROOT / GOLDEN[command]).read_text()
    return _output(command) if " docs/figures/" in command else None


def _output(command: str, colour: bool = False) -> str:
    """Runs a command of kvctl in this process, as on a terminal of `WIDTH` columns, without settings of the user.

    `| head -n N` after it keeps the first lines.
    """
    command, _, lines = command.partition(" | head -n ")
    with _surroundings(), contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        if colour:
            del os.environ["NO_COLOR"]
        run([*shlex.split(command)[1:], "--color", "always" if colour else "auto"])
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines()[: int(lines) if lines else None])


@contextlib.contextmanager
def _surroundings() -> Iterator[None]:
    kept, terminal = dict(os.environ), command_output.to_terminal
    with tempfile.TemporaryDirectory() as empty, contextlib.chdir(ROOT):
        for name in [name for name in os.environ if name.startswith("KVCTL_")]:
            del os.environ[name]
        names = ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")
        os.environ |= {"COLUMNS": str(WIDTH), "NO_COLOR": "1", "TZ": "UTC", **dict.fromkeys(names, empty)}
        time.tzset()
        command_output.to_terminal = lambda: True
        try:
            yield
        finally:
            command_output.to_terminal = terminal
            os.environ.clear()
            os.environ.update(kept)
            time.tzset()


def picture() -> str:
    """Returns the screen of `kvctl top` at the end of the recording `PICTURE`, as SVG."""

    async def screen() -> str:
        feed = _Playback(RecordingSource(FIGURES / f"{PICTURE}.kvrec", at=0))
        app = TopApp(feed, Mode(source="", no_agents=lambda survey: ""), "overview", clock=lambda: 0)
        async with app.run_test(size=PICTURE_SIZE) as pilot:
            await pilot.pause()
            while feed.advance():
                await pilot.pause()
            return svg(app)

    with _surroundings():
        del os.environ["NO_COLOR"]
        return asyncio.run(screen())


def terminal(command: str, height: int) -> str:
    """Returns what a command prints on a terminal in colour, as SVG."""
    recording = command.split(" --from ")[1]
    typed = command.replace("ROOM", _oldest_room(recording)) if "ROOM" in command else command
    printed = Text.from_ansi(_output(typed, colour=True).rstrip())
    text = Text.assemble(("$ ", "dim"), (f"{typed.split(' --from ')[0]}\n", "bold"), printed)
    console = Console(width=WIDTH, color_system="truecolor", force_terminal=True, file=io.StringIO())
    lines = console.render_lines(text, console.options, pad=True)[:height]

    def drawn(segment: Segment) -> Segment:
        style = segment.style or Style()
        number = style.color.number if style.color is not None else None
        name = "dim" if style.dim else "" if number is None else _ANSI[number % 8]
        return Segment(segment.text, style_of(f"bold {name}" if style.bold else name))

    return svg_of([[drawn(each) for each in line] for line in lines], WIDTH)


class _Playback(Feed):
    """Feed of the app that reads a recording, one snapshot after another, as a live fleet was read."""

    def __init__(self, source: RecordingSource) -> None:
        super().__init__(source, 0)
        self._playback = source
        self._asked: Question | None = None
        self._watch = HealthWatch()

    @property
    def recorded(self) -> bool:
        return False

    def start(self, deliver: Deliver) -> None:
        self._deliver = deliver

    def ask(self, question: Question) -> None:
        self._asked = question
        self._read(question)

    def advance(self) -> bool:
        if not self._playback.advance():
            return False
        assert self._asked is not None
        self._read(self._asked)
        if self._playback.moment > len(self._playback.moments) - 3:
            self._read(Question("health", HEALTH_CALLS))
        return True

    def _read(self, question: Question) -> None:
        survey = self._playback.survey(question.calls)
        findings = self._watch(survey).findings if question.view == "health" else None
        self._deliver(Reading(question, survey.at_ns, survey, findings=findings))


@cache
def bench_figures() -> dict[str, str]:
    """Returns the figures of the benchmark that pages name."""
    document = json.loads((FIGURES / "bench.json").read_text())
    runs, env = document["runs"], document["env"]

    def rates(*paths: str) -> list[float]:
        return [run[path]["gb_per_s"] for run in runs for path in paths]

    def span(values: list[float]) -> str:
        low, high = (f"{each:.2g}" for each in (min(values), max(values)))
        return low if low == high else f"{low} to {high}"

    def count(path: str, name: str) -> str:
        return f"{runs[0][path][name]:,.0f}"

    busy = f", busy with other work (load {document['load']})" if document["load"] > 1 else ""
    times = [run["auto"]["gb_per_s"] / run["slice"]["gb_per_s"] for run in runs]
    return {
        "times": span(times),
        "slice": span(rates("slice")),
        "auto": span(rates("auto")),
        "descriptors": f"{count('auto', 'descriptors_per_room')} instead of {count('slice', 'descriptors_per_room')}",
        "rows": count("slice", "descriptors_per_room"),
        "machine": f"{env['cores']} cores of a virtual machine ({env['cpu']}){busy}",
        "date": document["date"],
        "runs": str(len(runs)),
        "rooms": (FIGURES / "bench.txt").read_text().split(" rooms of ")[0].split("\n")[-1],
    }


# ---- recording -----------------------------------------------------------------------------------------------------


def record(name: str, scene: Scene) -> None:
    """Starts the fleet of a scene and writes its recording.

    Raises:
        SystemExit: the scene does not show its code within two minutes, or a command fails.
    """
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "KVCTL_SOCKET_DIR": directory}

        def kvctl(arguments: str, codes: tuple[int, ...] = (0,)) -> str:
            command = [sys.executable, "-m", "kvctl", *shlex.split(arguments)]
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
            if done.returncode not in codes:
                sys.exit(f"figures: {name}: kvctl {arguments} ended with {done.returncode}: {done.stderr}")
            return done.stdout

        demo = [sys.executable, "-m", "kvctl", "demo", "--seed", "7", *shlex.split(scene.options)]
        fleet = subprocess.Popen(demo, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 120
            while scene.until and scene.until not in kvctl("health -o json", codes=(0, 1, 3, 4, 7)):
                if time.monotonic() > deadline:
                    sys.exit(f"figures: {name}: no {scene.until} within two minutes")
            time.sleep(scene.after_s)
            _record(kvctl, name, scene.for_s)
            if scene.action:
                agent, serial = re.findall(
                    r'"subject": ?"(\S+) allocation (\d+)"', kvctl("health -o json", codes=(1,))
                )[0]
                kvctl(scene.action.format(f"{agent}:{serial}"))
                time.sleep(1)
                _record(kvctl, f"{name}-after", 0)
        finally:
            fleet.send_signal(signal.SIGTERM)
            fleet.wait(timeout=60)


def _record(kvctl: Callable[[str, tuple[int, ...]], str], name: str, for_s: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "scene.kvrec"
        kvctl(f"record {path}" + f" --for {for_s}s" * (for_s > 0), (0, 4, 7))
        shown = map(Redaction.of_this_machine().snapshot, _without_rest(recordings.load(path)))
        with (FIGURES / f"{name}.kvrec").open("wb") as file:
            write_snapshots(file, shown)


def _without_rest(snapshots: SnapshotReader) -> Iterator[RecordedSnapshot]:
    """Yields the snapshots without answers and timelines that nothing shows; all but the last two for curves only."""
    for left, snapshot in zip(reversed(range(len(snapshots))), snapshots, strict=True):
        listed = (
            {row["room"] for agent in snapshot.agents for row in _unfinished_or_failed(agent)} if left == 0 else set()
        )
        commands = {answer.command for agent in snapshot.agents for answer in agent.answers}
        kept = {(command, None) for command in (commands - LEFT_OUT if left < 2 else OF_CURVES)}
        kept |= {("room", room) for room in listed}
        agents = [
            replace(agent, answers=[each for each in agent.answers if (each.command, each.room) in kept])
            for agent in snapshot.agents
        ]
        yield replace(snapshot, agents=agents)


def _unfinished_or_failed(agent: RecordedAgent) -> list[Any]:
    rooms, failed = agent.find("rooms"), agent.find("failed")
    return [*((rooms and rooms.data) or []), *((failed and failed.data) or {"rooms": []})["rooms"]]


def bench() -> None:
    """Runs the benchmark `RUNS` times; the text is that of the run with the median ratio."""
    load = os.getloadavg()[0]
    texts, results = [], []
    for _ in range(RUNS):
        with tempfile.TemporaryDirectory() as directory:
            saved = Path(directory) / "bench.json"
            command = [sys.executable, "-m", *_MEASURE.split(), "--save", str(saved)]
            environment = {**os.environ, "KVCTL_SOCKET_DIR": directory}
            text = subprocess.run(
                command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True
            ).stdout
            document: dict[str, Any] = json.loads(saved.read_text())
        names = ("gb_per_s", "descriptors_per_room", "writes_per_room")
        result = {each["path"]: {name: each[name] for name in names} for each in document["runs"]}
        floors = document["floors"]
        result |= {"memcpy_gb_per_s": floors["memcpy_gb_per_s"], "write_gb_per_s": floors["transport_write_gb_per_s"]}
        texts.append(f"bench: {_MEASURE}\n{text}")
        results.append(result)
    times = [each["auto"]["gb_per_s"] / each["slice"]["gb_per_s"] for each in results]
    (FIGURES / "bench.txt").write_text(texts[times.index(sorted(times)[RUNS // 2])])
    about = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "load": round(load, 1),
        "env": document["env"],
        "runs": results,
    }
    (FIGURES / "bench.json").write_text(json.dumps(about, indent=1) + "\n")


def main() -> None:
    others = {"bench": bench}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"{', '.join(others)}, {', '.join(SCENES)}; all without one")
    wanted = parser.parse_args().names or [*others, *SCENES]
    FIGURES.mkdir(exist_ok=True)
    for name in wanted:
        print(f"figures: {name}", flush=True)
        others[name]() if name in others else record(name, SCENES[name])


if __name__ == "__main__":
    main()
