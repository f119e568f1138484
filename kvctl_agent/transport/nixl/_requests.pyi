from typing import Any

import numpy as np
import numpy.typing as npt

class Library:
    def __init__(self, path: str, abi: bytes, agent: Any) -> None: ...

class Requests:
    def __init__(
        self,
        library: Library,
        peer: str,
        local: npt.NDArray[np.uint64] | npt.NDArray[np.int32],
        remote: npt.NDArray[np.uint64] | npt.NDArray[np.int32],
        sizes: npt.NDArray[np.uint64] | None,
        lists: tuple[int, int, int] | None,
        ends: list[int],
        tags: list[bytes],
        until_ns: int,
        linger_ns: int,
        threads: int,
    ) -> None: ...
    def post(self) -> None: ...
    def resume(self, until_ns: int) -> None: ...
    def stop(self) -> None: ...
    def poll(self) -> bool: ...
    @property
    def error(self) -> int: ...
    @property
    def post_ns(self) -> int: ...
    @property
    def skipped(self) -> bool: ...
    @property
    def unposted(self) -> bool: ...
    @property
    def then(self) -> object: ...
