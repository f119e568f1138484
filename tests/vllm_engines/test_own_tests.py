"""vLLM's own tests of lifecycles, failed loads and MultiConnector, from its source distribution, over kvctl's class."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.vllm_engines.processes import REPOSITORY

FOLDER = "tests/v1/kv_connector/unit"
MODULES = (
    "cache_pollution_prevention",
    "error_propagation",
    "invalid_blocks_correctness",
    "kv_connector_lifecycle",
    "kv_load_failure_recovery",
    "multi_connector",
    "remote_decode_lifecycle",
    "remote_prefill_lifecycle",
)
LEFT_OUT = {
    "remote_decode_lifecycle.py::test_short_prompt_lifecycle": "reads a parameter of NixlConnector",
    "remote_decode_lifecycle.py::test_prefix_cache_lifecycle": "reads a parameter of NixlConnector",
    "remote_prefill_lifecycle.py::test_p_side_chunked_prefill_mamba": "has no layer of attention",
    "remote_prefill_lifecycle.py::test_async_load_reserves_blocks_for_promotion_margin": "speculative decoding",
    "remote_prefill_lifecycle.py::test_async_load_does_not_double_reserve_mamba_spec_blocks": "speculative decoding",
    "multi_connector.py::test_multi_example_connector_consistency": "downloads a model",
}
# Of the model that the tests name; they need no weights.
OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
    "do_layer_norm_before": True,
    "torch_dtype": "float16",
}
PASSED = 60
RUN_S = 900


def test_vllm_tests_pass(tmp_path: Path) -> None:
    venv = Path(os.environ["VLLM_VENV"])
    [source] = (venv / "sdist").glob("vllm-*/")
    model = tmp_path / "facebook" / "opt-125m"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(OPT))
    command = [str(venv / "bin" / "python"), "-m", "pytest", "-q", "-p", "kvctl_in_vllm_tests"]
    command += ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(source), f"--confcutdir={source / FOLDER}"]
    command += [f"--deselect={FOLDER}/test_{name}" for name in LEFT_OUT]
    command += [str(source / FOLDER / f"test_{name}.py") for name in MODULES]
    path = f"{Path(__file__).parent}:{source}:{REPOSITORY}"
    run = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    summary = run.stdout.strip().splitlines()[-1]
    print(f"vLLM's own tests: {summary}")
    assert int(summary.split()[0]) >= PASSED
