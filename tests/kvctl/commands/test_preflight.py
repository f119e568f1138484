"""`kvctl preflight`: refused options, the manifest, and processes on this host, which the command of --ssh starts."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import yaml

from docs.json_schema import document_conflicts

# Runs a command here, as a login on the host would there.
HERE = ("--ssh", "env KVCTL_PREFLIGHT_HOST={host}", "--python", sys.executable)


def test_the_manifest_has_a_pod_on_each_node_with_its_gpus(kvctl: Any) -> None:
    outcome = kvctl(
        *("preflight", "node-1", "node-2", "--prefill-tp", "4", "--decode-tp", "4", "--device", "cuda"),
        *("--manifest", "example/worker:1"),
    )
    assert outcome.code == 0
    job = yaml.safe_load(outcome.out)
    assert (job["kind"], job["spec"]["completions"], job["spec"]["parallelism"]) == ("Job", 2, 2)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (container["image"], container["resources"]["limits"]) == ("example/worker:1", {"nvidia.com/gpu": 4})
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"][0]["values"] == ["node-1", "node-2"]
    assert "kubectl exec -i {host} --" in outcome.out


def test_a_host_that_cannot_be_entered_is_named_with_what_the_command_said(kvctl: Any) -> None:
    outcome = kvctl("preflight", "gpu1", "--ssh", "sh -c 'echo Permission denied >&2; exit 255'", "-o", "json")
    assert outcome.code == 1
    (data,) = json.loads(outcome.out)["data"]
    assert [(each["code"], each["subject"]) for each in data["findings"]] == [("KV_NOT_READY", "gpu1")]
    assert "exit code 255; its last output: Permission denied" in data["findings"][0]["cause"]
    assert [row["verdict"] for row in data["pairs"]] == ["critical"]


def test_the_headline_counts_all_pairs_whatever_is_filtered(kvctl: Any) -> None:
    outcome = kvctl("preflight", "gpu1", "--ssh", "false", "--filter", "verdict=ok")
    assert outcome.code == 1
    assert "1 critical   1 pair of ranks on 1 host\n" in outcome.out


@pytest.mark.full
@pytest.mark.parametrize("transport", ["nixl", "mooncake"])
def test_two_ranks_of_this_host_move_memory(transport: str, kvctl: Any) -> None:
    outcome = kvctl(
        *("preflight", "here=127.0.0.1", *HERE, "--transport", transport, "--deadline", "30s", "-o", "json")
    )
    document = json.loads(outcome.out)
    (data,) = document["data"]
    assert (outcome.code, data["ok"]) == (0, True), data["findings"]
    assert document_conflicts(document) == []
    (row,) = data["pairs"]
    assert (row["verdict"], row["problem"]) == ("ok", "")
    assert row["gb_per_s"] > 0
    # NIXL copies between the processes; Mooncake has only its network protocols.
    assert (row["lane"], list(row["carried"])) == ((None, []) if transport == "nixl" else ("tcp", ["lo"]))


@pytest.mark.full
def test_variables_reach_the_engine(kvctl: Any) -> None:
    outcome = kvctl(
        *("preflight", "here=127.0.0.1", *HERE, "--env", "UCX_TLS=tcp,self", "--deadline", "30s", "-o", "json")
    )
    (data,) = json.loads(outcome.out)["data"]
    (row,) = data["pairs"]
    assert (row["lane"], row["lane_source"], list(row["carried"])) == ("tcp", "counters", ["lo"])
