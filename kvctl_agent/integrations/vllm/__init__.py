"""vLLM connector: `KvctlConnector`, which vLLM loads by `kv_connector_module_path`.

vLLM creates one in its scheduler and one in each worker process. Only `versions` can be imported without vLLM.
"""
