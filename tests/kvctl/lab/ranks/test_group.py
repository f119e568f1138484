"""Ranks that answer, die, fail, hang, babble or stay: every wait ends, every process too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvctl.lab.ranks.group import RankDied, RankFailed, RankGroup, RankOverdue
from kvctl.lab.ranks.messages import Stop, Verify
from kvctl_agent.contract.admin import region_directory
from tests.support.polling import until

Start = Callable[..., None]
AtBest = Callable[[Callable[[], float], float], None]
ASK = Verify("full")
LONG_S = 100.0


@pytest.fixture
def patient(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that leave in order get all the time that a busy machine may take from them."""
    monkeypatch.setattr("kvctl.lab.ranks.group.CLOSE_S", LONG_S)


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_every_rank_answers_for_itself(group: RankGroup, start: Start):
    for name in ("a", "b", "c"):
        start(name)
    answers = group.ask({"a": ASK, "c": ASK}, LONG_S, "the test")
    assert answers == {name: {"pid": group.processes[name].pid} for name in ("a", "c")}


def test_a_killed_rank_is_named_with_its_signal_and_last_words(group: RankGroup, start: Start):
    start("prefill-0")
    start("decode-1", "print('first line'); print('out of cheese', flush=True); lines.readline(); time.sleep(60)")
    group.processes["prefill-0"].send(ASK)
    victim = group.processes["decode-1"]
    until(lambda: victim.read_output() or "cheese" in victim.last_output)
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(RankDied) as caught:
        group.ask({"prefill-0": ASK, "decode-1": ASK}, LONG_S, "run of staged, lot 1 of 2")
    assert str(caught.value) == (
        f'rank "decode-1" (pid {victim.pid}) was killed by SIGKILL during run of staged, lot 1 of 2; '
        f"its last output:\n  first line\n  out of cheese"
    )


def test_a_rank_that_exits_is_named_with_its_code(group: RankGroup, start: Start):
    start("a", "sys.exit(7)")
    with pytest.raises(RankDied, match=r'rank "a" \(pid \d+\) exited with code 7 during boot; it printed nothing'):
        group.ask({"a": ASK}, LONG_S, "boot")


def test_what_a_rank_says_it_died_of_is_told(group: RankGroup, start: Start):
    start("a", "say('fatal', code='TransportUnavailable', message='no nixl here'); sys.exit(1)")
    with pytest.raises(
        RankFailed, match=r'rank "a" gave up during start: no nixl here \(TransportUnavailable\)'
    ) as caught:
        group.ask({"a": ASK}, LONG_S, "start")
    assert caught.value.code == "TransportUnavailable"


def test_a_kill_is_the_cause_though_another_rank_complains_first(
    group: RankGroup, start: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kvctl.lab.ranks.group._EXIT_AFTER_FATAL_S", LONG_S)
    start("a", "lines.readline(); say('fatal', code='PeerDisconnected', message='lost b'); time.sleep(60)")
    start("b", "lines.readline(); time.sleep(0.3); os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(RankDied, match=r'rank "b" .* was killed by SIGKILL'):
        group.ask({"a": ASK, "b": ASK}, LONG_S, "run")


def test_a_silent_rank_misses_the_deadline_with_what_it_was_doing(group: RankGroup, start: Start):
    start("a")
    start("b", "say('progress', doing='waiting for its peers'); time.sleep(60)")
    until(lambda: group.processes["b"].read() or group.processes["b"].doing)
    group.ask({"a": ASK}, LONG_S, "start")
    with pytest.raises(RankOverdue) as caught:
        group.ask({"a": ASK, "b": ASK}, 2.0, "start")
    assert str(caught.value) == ('rank "b" did not finish start within 2 s; last heard: waiting for its peers')


def test_a_flood_of_output_neither_blocks_nor_is_kept(group: RankGroup, start: Start):
    start("a", "lines.readline(); sys.stdout.write('x' * 79 + chr(10)) if 0 else None\n"
               "for i in range(300_000): print('flood', i)\n"
               "sys.stdout.flush(); answer(b'{\"do\": \"verify\"}')\ntime.sleep(60)")  # fmt: skip
    group.ask({"a": ASK}, LONG_S, "flood")
    until(lambda: group.processes["a"].read_output() or "flood 299999" in group.processes["a"].last_output)
    assert len(group.processes["a"].last_output) <= 2000


def test_garbage_on_the_channel_is_the_ranks_failure(group: RankGroup, start: Start):
    start("a", "lines.write(b'not json\\n'); lines.flush(); time.sleep(60)")
    with pytest.raises(RankFailed, match="sent an invalid message"):
        group.ask({"a": ASK}, LONG_S, "start")


def test_escape_sequences_in_last_words_do_not_reach_the_terminal(group: RankGroup, start: Start):
    start("a", r"print('\x1b[31mred\x07', flush=True); sys.exit(1)")
    with pytest.raises(RankDied, match=r"\[31mred") as caught:
        group.ask({"a": ASK}, LONG_S, "start")
    assert "\x1b" not in str(caught.value)


def test_close_hangs_up_and_ranks_leave_in_order(group: RankGroup, start: Start, patient: None):
    start("a")
    start("b")
    group.ask({"a": ASK, "b": ASK}, LONG_S, "the test")
    assert group.close() == {"a": 0, "b": 0}
    assert all(gone(rank.pid) for rank in group.processes.values())


def test_a_rank_whose_start_was_interrupted_is_ended_too(
    group: RankGroup, start: Start, patient: None, monkeypatch: pytest.MonkeyPatch
):
    popen = subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> Any:
        process = popen(*arguments, **options)
        os.kill(os.getpid(), signal.SIGINT)
        return process

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", interrupted)
        with pytest.raises(KeyboardInterrupt):
            start("a")
    assert group.close() == {"a": 0}


def test_a_rank_told_to_stop_may_be_gone_before_the_others_have_answered(group: RankGroup, start: Start, patient: None):
    start("a", "answer(lines.readline())")
    start("b", "line = lines.readline(); time.sleep(0.5); answer(line)")
    group.ask({"a": Stop(), "b": Stop()}, LONG_S, "stop")
    assert group.close() == {"a": 0, "b": 0}


def test_close_kills_what_ignores_it(group: RankGroup, start: Start):
    start("deaf", "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)")
    start("stopped", "os.kill(os.getpid(), signal.SIGSTOP)")
    codes = group.close()
    assert codes == {"deaf": -signal.SIGKILL, "stopped": -signal.SIGKILL}
    assert all(gone(rank.pid) for rank in group.processes.values())


def test_the_terminals_interrupt_reaches_only_the_bench(group: RankGroup, start: Start):
    """Ranks live in process groups of their own: the bench decides how they end."""
    start("a")
    assert os.getpgid(group.processes["a"].pid) != os.getpgrp()


def test_ranks_end_when_their_parent_is_killed(tmp_path: Path):
    """Real ranks, which have not been told who they are, whose parent gets SIGKILL."""
    script = textwrap.dedent("""
        import time
        from kvctl.lab.ranks.group import RankGroup
        group = RankGroup()
        for name in ("a", "b"):
            group.launch(name)
        print(*(rank.pid for rank in group.processes.values()), flush=True)
        time.sleep(60)
    """)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        time.sleep(0.5)
        parent.kill()
    until(lambda: all(gone(pid) for pid in pids))


def test_a_command_larger_than_the_sockets_buffer_arrives_whole(group: RankGroup, start: Start):
    start("a", "time.sleep(0.3); line = lines.readline(); answer(line, length=len(line))")
    (answer,) = group.ask({"a": Verify("x" * (4 << 20))}, LONG_S, "the test").values()
    assert answer["length"] > 4 << 20


def test_a_rank_that_reads_nothing_blocks_nobody(group: RankGroup, start: Start):
    start("a", "os.kill(os.getpid(), signal.SIGSTOP)")
    for _ in range(4):
        group.processes["a"].send(Verify("x" * (4 << 20)))
    assert group.poll(0.0) == []
    group.processes["a"].signal(signal.SIGKILL)
    until(lambda: [event.kind for event in group.poll(0.1)] == ["exited"])


def test_what_killed_ranks_left_is_removed_at_the_end(socket_directory: Path) -> None:
    regions = region_directory(socket_directory)
    regions.mkdir(exist_ok=True)
    left = ("decode-0.sock", "decode-0.lock", "decode-0.ended-7.sock")
    files = [socket_directory / name for name in (*left, "decode-01.lock")]
    files += [regions / name for name in ("decode-0.7.00ff.region", "decode-0.8.00fe.ended", "decode-01.9.00fd.region")]
    group = RankGroup(["decode-0"])
    for path in files:
        path.touch()
    group.close()
    kept = [path for path in files if path.exists()]
    try:
        assert [path.name for path in kept] == ["decode-01.lock", "decode-01.9.00fd.region"]
    finally:
        for path in kept:
            path.unlink()
