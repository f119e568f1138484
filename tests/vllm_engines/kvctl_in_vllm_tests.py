"""Plugin of pytest for vLLM's own connector tests: those of no particular connector run over kvctl's.

They make configurations and requests with functions of `tests/v1/kv_connector/unit/utils.py`; these get other defaults.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    utils = importlib.import_module("tests.v1.kv_connector.unit.utils")
    make_config, make_request = utils.create_vllm_config, utils.create_request

    @functools.wraps(make_config)
    def config_with_kvctl(*arguments: Any, **options: Any) -> Any:
        if "kv_connector" not in options:
            prefill = "remote_decode" in inspect.stack()[1].filename
            options["kv_connector"] = "KvctlConnector"
            options["kv_connector_module_path"] = "kvctl_agent.integrations.vllm.connector"
            options.setdefault("kv_role", "kv_producer" if prefill else "kv_consumer")
        return make_config(*arguments, **options)

    @functools.wraps(make_request)
    def request_with_kvctl(*arguments: Any, **options: Any) -> Any:
        request = make_request(*arguments, **options)
        if request.kv_transfer_params is not None:
            request.kv_transfer_params |= {"transfer_id": request.request_id, "kvctl_prefill": "tcp://127.0.0.1:1"}
        return request

    utils.create_vllm_config, utils.create_request = config_with_kvctl, request_with_kvctl
