from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Span = tuple[int, int, int, int]  # layer, plane, first page and end

class HeadSlice:
    def __init__(
        self, blocks: list[int], planes: list[tuple[int, int, int, int, int, int, int]], num_slots: int
    ) -> None: ...

class Copy:
    def done(self) -> bool: ...
    @property
    def copy_ns(self) -> int: ...

class Pool:
    def __init__(self, threads: int, wake_fd: int, error: type[Exception], considerate: bool) -> None: ...
    def start(self) -> None: ...
    def begin(
        self,
        gather: bool,
        jobs: Sequence[tuple[HeadSlice, npt.NDArray[np.int64], tuple[Span, ...], npt.NDArray[np.uint8]]],
        owner: object = None,
    ) -> Copy: ...
    def run(self, count: int, owner: object) -> Copy: ...
    def close(self) -> None: ...
    @property
    def pieces_at_once(self) -> int: ...
    @property
    def has_threads(self) -> bool: ...

def page_descriptors(
    src: npt.NDArray[np.int32] | npt.NDArray[np.int64],
    dst: npt.NDArray[np.int32] | npt.NDArray[np.int64],
    src_steps: tuple[int, int, int],
    dst_steps: tuple[int, int, int],
    page_bytes: int,
    local: npt.NDArray[np.int64],
    remote: npt.NDArray[np.int64],
) -> tuple[bytes, bytes, bytes]: ...
