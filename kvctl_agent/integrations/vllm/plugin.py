"""Entry point of the plugin that vLLM loads in each of its processes; `KVCTL_VLLM` chooses what it does.

observe: vLLM's own NIXL connectors and MooncakeConnector are served on kvctl's admin socket. off, the default: nothing.
vLLM loads only the plugins that VLLM_PLUGINS names, if that is set.
"""

from __future__ import annotations

import logging
import os

from kvctl_agent.contract.vllm import MODES, VARIABLE, mode

logger = logging.getLogger("vllm.kvctl")


def load() -> None:
    """Hooks vLLM's connectors in mode observe; called by vLLM.

    It never raises: a plugin that does not fit, or fails, leaves vLLM as it is and says so in one line of the log.
    """
    chosen = mode()
    if chosen is None:
        text, modes = os.environ.get(VARIABLE), ", ".join(MODES)
        logger.error("kvctl plugin not loaded: %s=%s is no mode; set one of %s", VARIABLE, text, modes)
    elif chosen == "observe":
        try:
            from kvctl_agent.integrations.vllm.observe.observer import install

            install()
            logger.info("kvctl plugin loaded: mode observe")
        except Exception as error:
            logger.error("kvctl plugin not loaded: %s: %s", type(error).__name__, error)
