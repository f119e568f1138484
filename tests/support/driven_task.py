"""A task of the control loop, driven by a thread of the test in the loop's place."""

from __future__ import annotations

import threading
from typing import Any

from kvctl_agent.runtime.waiting import LoopTask, minimize_timer_slack


class DrivenTask:
    """Makes turns until it is closed and the task is idle, and waits as long as the task says, or until `wake`."""

    def __init__(self, task: LoopTask | Any) -> None:
        self.task = task
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="driven", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, order: Any) -> None:
        with self._lock:
            self.task.put(order)
        self.wake()

    def wake(self) -> None:
        self._woken.set()

    def close(self, timeout: float) -> bool:
        self._closing = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        minimize_timer_slack()
        while not (self._closing and self.task.idle()):
            with self._lock:
                self.task.turn()
                wait_s = self.task.wait_s()
            self._woken.wait(min(wait_s, 0.1))
            self._woken.clear()
