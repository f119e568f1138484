"""Kubernetes Job whose pods wait for a preflight: one on each node, with what a worker would have."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence

from kvctl.lab.preflight.run import Options, PlannedRank
from kvctl_agent.contract.choices import HOST

NAME = "kvctl-preflight"
_ENDS_S = 1800
_LABEL = "kubernetes.io/hostname"


def manifest(image: str, nodes: Sequence[str], ranks: Sequence[PlannedRank], options: Options) -> str:
    """Returns the Job as YAML, with the commands that use it as a comment.

    The pods sleep for at most half an hour; `kubectl exec` starts the ranks in them, as ssh does on hosts.
    """
    import yaml  # takes 30 ms to import

    most = max(Counter(rank.host for rank in ranks).values())
    gpus = {"nvidia.com/gpu": most} if any(rank.device != HOST for rank in ranks) else {}
    labels = {"app.kubernetes.io/name": NAME}
    container = {
        "name": "worker",
        "image": image,
        "command": ["sleep", str(_ENDS_S)],
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        "resources": {"limits": gpus},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    only = {"key": _LABEL, "operator": "In", "values": list(nodes)}
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [only]}]}
            },
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {"labelSelector": {"matchLabels": labels}, "topologyKey": _LABEL}
                ]
            },
        },
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}],
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": NAME, "labels": labels},
        "spec": {
            "completions": len(nodes),
            "parallelism": len(nodes),
            "backoffLimit": 0,
            "activeDeadlineSeconds": _ENDS_S,
            "ttlSecondsAfterFinished": 60,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    selector = f"-l app.kubernetes.io/name={NAME}"
    names = f"kubectl get pods {selector} --sort-by=.spec.nodeName -o jsonpath='{{.items[*].metadata.name}}'"
    comment = (
        "# Add what your workers have: hostNetwork, resources of an RDMA device plugin, tolerations. Then:",
        "# (The pods are in the order of the names of their nodes; the first ones get the prefill ranks.)",
        "#   kubectl apply -f job.yaml",
        f"#   kubectl wait --for=condition=Ready --timeout=5m pod {selector}",
        f"#   kvctl preflight $({names}) \\",
        f"#     --ssh 'kubectl exec -i {{host}} --' --python {shlex.quote(shlex.join(options.python))} LAYOUT…",
        f"#   kubectl delete job {NAME}",
    )
    return "\n".join((*comment, yaml.safe_dump(job, sort_keys=False)))
