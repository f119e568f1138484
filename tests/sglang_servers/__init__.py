"""Stock SGLang servers on the CPU: `make test-sglang`. Not part of `make test`."""
