from __future__ import annotations

import pytest

from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.shape import ModelShape


def test_bytes_follow_from_dims_that_may_differ() -> None:
    shape = ModelShape(num_layers=3, num_kv_heads=5, k_dim=192, v_dim=128, dtype_bytes=2)
    assert shape.k_head_bytes == 384
    assert shape.v_head_bytes == 256
    assert shape.token_head_bytes == 640
    assert shape.token_bytes == 3 * 5 * 640


def test_the_reference_model_has_128_mib_per_1024_tokens() -> None:
    assert ModelShape(32, 8, 128, 128, 2).token_bytes * 1024 == 128 * 2**20


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "k_dim", "v_dim", "dtype_bytes"])
@pytest.mark.parametrize("value", [0, -2, 1.5, "8", False])
def test_a_bad_size_is_refused_by_name(field: str, value: object) -> None:
    sizes: dict[str, object] = {"num_layers": 1, "num_kv_heads": 1, "k_dim": 1, "v_dim": 1, "dtype_bytes": 2}
    with pytest.raises(LayoutError, match=f"^{field} is "):
        ModelShape(**(sizes | {field: value}))  # type: ignore[arg-type]


def test_latent_pools_are_refused_as_not_supported_yet() -> None:
    with pytest.raises(LayoutError, match="'mla': latent pools are not supported yet by this version"):
        ModelShape(1, 1, 1, 1, 2, kind="mla")


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(LayoutError, match="kind 'ring' is unknown"):
        ModelShape(1, 1, 1, 1, 2, kind="ring")
