"""Kubernetes Job whose pods wait for a preflight: one on each node, with what a worker would have."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from string import Template

from kvctl.lab.preflight.run import Options, PlannedRank
from kvctl_agent.contract.choices import HOST

_PODS = "-l app.kubernetes.io/name=kvctl-preflight"
_NAMES = f"kubectl get pods {_PODS} --sort-by=.spec.nodeName -o jsonpath='{{.items[*].metadata.name}}'"
_JOB = Template(f"""\
# Add what your workers have: hostNetwork, resources of an RDMA device plugin, tolerations. Then:
# (The pods are in the order of the names of their nodes; the first ones get the prefill ranks.)
#   kubectl apply -f job.yaml
#   kubectl wait --for=condition=Ready --timeout=5m pod {_PODS}
#   kvctl preflight $$({_NAMES}) \\
#     --ssh 'kubectl exec -i {{host}} --' --python $python LAYOUT…
#   kubectl delete job kvctl-preflight
apiVersion: batch/v1
kind: Job
metadata: {{name: kvctl-preflight, labels: &labels {{app.kubernetes.io/name: kvctl-preflight}}}}
spec:
  completions: $pods
  parallelism: $pods
  backoffLimit: 0
  activeDeadlineSeconds: 1800
  ttlSecondsAfterFinished: 60
  template:
    metadata: {{labels: *labels}}
    spec:
      restartPolicy: Never
      terminationGracePeriodSeconds: 1
      affinity:
        nodeAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms:
            - matchExpressions:
              - {{key: kubernetes.io/hostname, operator: In, values: $nodes}}
        podAntiAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
          - {{labelSelector: {{matchLabels: *labels}}, topologyKey: kubernetes.io/hostname}}
      containers:
      - name: worker
        image: $image
        command: [sleep, "1800"]
        securityContext: {{capabilities: {{add: [IPC_LOCK]}}}}
        resources: {{limits: $gpus}}
        volumeMounts: [{{name: shm, mountPath: /dev/shm}}]
      volumes: [{{name: shm, emptyDir: {{medium: Memory, sizeLimit: 8Gi}}}}]
""")


def manifest(image: str, nodes: Sequence[str], ranks: Sequence[PlannedRank], options: Options) -> str:
    """Returns the Job as YAML, with the commands that use it as a comment.

    The pods sleep for at most half an hour; `kubectl exec` starts the ranks in them, as ssh does on hosts.
    """
    most = max(Counter(rank.host for rank in ranks).values())
    return _JOB.substitute(
        python=shlex.quote(shlex.join(options.python)),
        pods=len(nodes),
        nodes=json.dumps(list(nodes)),
        image=json.dumps(image),
        gpus=json.dumps({"nvidia.com/gpu": most} if any(rank.device != HOST for rank in ranks) else {}),
    )
