"""The plugin in SGLang's own loader: its modes, and SGLang as it was where the plugin does not fit."""

import functools
import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tests.support.sglang.cases import Case, Ranks, Room
from tests.support.sglang.pair import PDPair, in_sglang
from tests.support.sglang.runtime import SETTINGS, VERSION

STOCK = {"nixl": "NixlKVManager", "mooncake": "MooncakeKVManager", "kvctl": None}


@dataclass(frozen=True)
class Loaded:
    """SGLang after its plugins were loaded: whether the name is a choice, the manager of each name, and kvctl's log."""

    choice: bool
    managers: dict[str, str | None]
    lines: list[str]


def load(change: str = "") -> Loaded:
    """Loads SGLang's plugins in this process, after a change to SGLang."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.disaggregation import utils
    from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVSender
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name.startswith("kvctl") or "kvctl" in record.getMessage():
                lines.append(record.getMessage())

    def send(self: Any, indices: Any, state_indices: Any = None) -> None:
        pass

    @functools.wraps(HookRegistry.register)
    def register(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no hooks today")

    logging.getLogger().addHandler(Lines())
    logging.getLogger("kvctl").setLevel("INFO")
    if change == "other signature":
        CommonKVSender.send = send
    elif change == "missing function":
        del CommonKVManager._handle_node_failure
    elif change == "raising":
        HookRegistry.register = register
    load_plugins()
    managers: dict[str, str | None] = {}
    for name in STOCK:
        try:
            backend = utils.TransferBackend(name)
            managers[name] = utils.get_kv_class(backend, utils.KVClassType.MANAGER).__name__
        except ValueError:
            managers[name] = None
    return Loaded("kvctl" in choices.DISAGG_TRANSFER_BACKEND_CHOICES, managers, lines)


def test_backend_is_a_choice_beside_sglangs_own() -> None:
    found = in_sglang(load)
    assert found.choice
    assert found.managers == STOCK | {"kvctl": "KvctlKVManager"}
    assert found.lines == [f"kvctl plugin loaded: mode backend, SGLang {VERSION}"]


def test_replace_gives_the_name_nixl_the_same_classes() -> None:
    found = in_sglang(load, KVCTL_SGLANG="replace")
    assert found.managers == STOCK | {"kvctl": "KvctlKVManager", "nixl": "KvctlKVManager"}


def test_observe_and_off_replace_no_class() -> None:
    for mode in ("observe", "off"):
        found = in_sglang(load, KVCTL_SGLANG=mode)
        assert not found.choice, mode
        assert found.managers == STOCK, mode


def test_wrong_mode_changes_nothing_and_says_so_in_one_line() -> None:
    found = in_sglang(load, KVCTL_SGLANG="replce")
    assert not found.choice
    assert found.managers == STOCK
    (line,) = found.lines
    assert "KVCTL_SGLANG=replce" in line
    assert "backend, replace, observe, off" in line


def test_sglang_with_another_interface_is_left_as_it_was() -> None:
    expected = {
        "other signature": "CommonKVSender.send has parameters",
        "missing function": "CommonKVManager._handle_node_failure",
    }
    for change, named in expected.items():
        found = in_sglang(load, change)
        assert not found.choice, change
        assert found.managers == STOCK, change
        (line,) = found.lines
        assert "SGLang is unchanged" in line
        assert named in line


def test_plugin_that_fails_does_not_take_the_process_down() -> None:
    found = in_sglang(load, "raising")
    assert not found.choice
    assert found.managers == STOCK
    assert "kvctl plugin not loaded: RuntimeError: no hooks today" in found.lines


def test_sglang_plugins_that_name_others_leave_it_out() -> None:
    found = in_sglang(load, SGLANG_PLUGINS="another")
    assert not found.choice
    assert found.managers == STOCK


def test_servers_that_ask_for_nixl_transfer_through_the_agent_when_it_is_replaced() -> None:
    case = Case("nixl", Ranks(tp=2), environment={"KVCTL_SGLANG": "replace"})
    with PDPair(case) as pair:
        assert {rank.names["manager"] for rank in pair.all()} == {"KvctlKVManager"}
        pair.transfer([Room(1), Room(2, tokens=96, chunks=(32,), prefix=16)]).check()


def rejection(backend: str, new_role: str, radix_cache: bool, decode_radix_cache: bool) -> tuple[str, bool] | None:
    """Returns why SGLang rejects a change of an idle server's role, and whether the server may go on; None if not."""
    load()
    from sglang.srt.disaggregation import role_switch, utils

    SETTINGS["get_disagg"] = SimpleNamespace(
        disaggregation_transfer_backend=backend, disaggregation_decode_enable_radix_cache=decode_radix_cache
    )
    scheduler = SimpleNamespace(
        server_args=SimpleNamespace(enable_pd_role_switch=True),
        disaggregation_mode=utils.DisaggregationMode("decode" if new_role == "prefill" else "prefill"),
        transfer_backend=utils.TransferBackend(backend),
        disable_radix_cache=not radix_cache,
        _pd_role_switch_unhealthy=False,
        _pd_role_switch_in_progress=False,
    )
    found: tuple[str, bool] | None = role_switch._reject_reason(scheduler, new_role)
    return found


def test_server_whose_radix_cache_would_leak_pages_does_not_become_a_decode_server() -> None:
    found = in_sglang(rejection, "kvctl", "decode", True, False)
    assert found is not None
    message, goes_on = found
    assert goes_on
    assert "--disaggregation-decode-enable-radix-cache or --disable-radix-cache" in message
    assert in_sglang(rejection, "nixl", "decode", True, False, KVCTL_SGLANG="replace") == found
    allowed = [
        ("kvctl", "decode", True, True),
        ("kvctl", "decode", False, False),
        ("kvctl", "prefill", True, False),
        ("mooncake", "decode", True, False),  # SGLang's own backends stay as they are
    ]
    assert [in_sglang(rejection, *each) for each in allowed] == [None] * len(allowed)


def test_other_reasons_to_reject_a_change_of_role_come_first() -> None:
    message, _ = in_sglang(rejection, "kvctl", "nonsense", True, False)
    assert message == "invalid new_role='nonsense'"
