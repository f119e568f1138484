"""The only models that the servers import: SGLANG_EXTERNAL_MODEL_PACKAGE names this package."""
