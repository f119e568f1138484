"""`kubernetes://NAMESPACE/SELECTOR`: the agents in pods with these labels, as the Kubernetes API names them.

Without a selector, all pods of the namespace that have such a container port.
Optional parts of the query: `port`, name or number of the admin endpoint's container port; `context`, of the kubeconfig
file; `via=port-forward`, where the pod network cannot be reached from here. Without a kubeconfig file, in a pod, its
service account is used.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl, unquote

import orjson

from kvctl.client.discovery import KINDS, malformed
from kvctl.client.discovery.pod_relay import PodStream, Relay
from kvctl.client.discovery.source import MAX_AGENTS, AgentSource, Found, SourceError
from kvctl.client.endpoints import Endpoint
from kvctl.client.faults import Fault, FaultCode
from kvctl.client.keys import KeyNames
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl_agent.contract.addresses import AddressError, tcp_address
from kvctl_agent.contract.extras import install

PORT_NAME = "kvctl-admin"
"""Name of the container port of an admin endpoint; further ranks of a pod have `kvctl-admin-1` and so on."""

POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""In a pod, the file with the namespace of its service account."""

_FORWARD = "port-forward"
NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_MOST_SELECTOR = 1024
_MOST_RELAYS = 256  # each has a descriptor, two threads and a connection to the API server
_AT_A_TIME = 16
_PAGE_PODS = 500
_MAX_BYTES = 64 << 20
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class _Target:
    namespace: str
    selector: str
    port: str
    context: str
    forward: bool


def _parse(url: str) -> _Target:
    place, _, parameters = url.removeprefix(KINDS["kubernetes"].prefix).partition("?")
    namespace, _, path = place.partition("/")
    selector = unquote(path)
    if not NAMESPACE.fullmatch(namespace) or len(selector) > _MOST_SELECTOR or "#" in url:
        raise malformed(url)
    try:
        query = dict(parse_qsl(parameters, strict_parsing=True)) if parameters else {}
    except ValueError:
        raise malformed(url) from None
    if unknown := query.keys() - {"port", "context", "via"}:
        raise malformed(url, f"{min(unknown)} is none of port, context, via")
    port = query.get("port", PORT_NAME)
    if port.isdecimal() and not 0 < int(port) < 1 << 16:
        raise malformed(url, f"{port} is not a port")
    if query.get("via", _FORWARD) != _FORWARD:
        raise malformed(url, f"via must be {_FORWARD}")
    return _Target(namespace, selector, port, query.get("context", ""), "via" in query)


@dataclass(frozen=True, slots=True)
class _PodPort:
    """Admin endpoint of a rank in a pod on `node`; `name` is that of the pod, with the port if the pod has several."""

    name: str = field(compare=False)
    pod: str
    uid: str
    ip: str
    port: int
    node: str


class PodSource(AgentSource):
    """The agents in the pods that a label selector selects."""

    refresh_ns: ClassVar[int] = 5_000_000_000

    def __init__(self, url: str, keys: KeyNames) -> None:
        super().__init__(url, keys)
        self._target = _parse(url)
        try:
            # Here, since the imports take half a second or more, which is not to count towards the limit of `find`.
            import_module("kubernetes.client")
            import_module("websocket")
        except ImportError:
            raise CliError(f"{url}: needs the Kubernetes client: {install('kubernetes')}", ExitCode.USAGE) from None
        self.lasting = not self._target.forward  # the ports of relays are other ones in the next run
        self._client: Any = None
        self._relays: dict[_PodPort, Relay] = {}

    def find(self, deadline_ns: int) -> Found:
        self._client = self._client or _api_client(self._target.context)
        ports: list[_PodPort] = []
        faults: list[Fault] = []
        number = 0
        for pod in self._pods(self._client, deadline_ns):
            number += 1
            try:
                ports += _ports(pod, self._target, faults)
            except (KeyError, TypeError, ValueError, AttributeError):
                raise SourceError("the answer is not a list of pods", FaultCode.PROTOCOL) from None
            if len(ports) > MAX_AGENTS:
                raise SourceError(f"more than {MAX_AGENTS} agents", FaultCode.PROTOCOL)
        if not number or not (ports or faults or self._target.selector):
            look = f"kubectl get pods -n {self._target.namespace} --show-labels"
            what = "these labels" if self._target.selector else f"a container port named {self._target.port}"
            raise SourceError(f"no pod has {what}; {look} lists those that there are")
        if not self._target.forward:
            try:
                remotes = [str(tcp_address(each.ip, each.port)) for each in ports]
            except AddressError:
                raise SourceError("the answer is not a list of pods", FaultCode.PROTOCOL) from None
            named = zip(ports, remotes, strict=True)
            return Found(tuple(Endpoint(each.name, None, True, at, each.node) for each, at in named), tuple(faults))
        forwarded = self._forward(self._client, ports, faults, deadline_ns)
        return Found(tuple(forwarded), tuple(faults))

    def close(self) -> None:
        for relay in self._relays.values():
            relay.close()
        self._relays.clear()
        if self._client is not None:
            self._client.close()

    def _pods(self, client: Any, deadline_ns: int) -> Iterator[Mapping[str, Any]]:
        """Yields the pods, as the API's JSON has them."""
        from kubernetes.client import ApiException, CoreV1Api
        from urllib3.exceptions import HTTPError, NewConnectionError, TimeoutError

        target, token = self._target, ""
        core: Any = CoreV1Api(client)
        while True:
            left_s = max(0.05, (deadline_ns - time.monotonic_ns()) / 1e9)
            try:
                answer = core.list_namespaced_pod(
                    target.namespace,
                    label_selector=target.selector or None,
                    limit=_PAGE_PODS,
                    **({"_continue": token} if token else {}),
                    _request_timeout=left_s,
                    _preload_content=False,
                )
                body = answer.read(_MAX_BYTES + 1)
                status = answer.status
            except ApiException as error:
                status, body = error.status or 0, (error.body or error.reason or "").encode()
            except (HTTPError, OSError) as error:
                # A refused connection is a timeout to urllib3.
                if isinstance(error, TimeoutError) and not isinstance(error, NewConnectionError):
                    text = f"{client.configuration.host} does not answer: raise --timeout"
                    raise SourceError(text, FaultCode.TIMEOUT) from None
                cause = getattr(error, "reason", None) or error
                raise SourceError(f"{client.configuration.host} cannot be reached: {cause!s:.{_SHOWN}}") from None
            if status == 401:  # credentials that change are read again
                client.close()
                self._client = None
            if status != 200:
                raise self._refusal(status, body)
            if len(body) > _MAX_BYTES:
                raise SourceError(f"more than {_MAX_BYTES >> 20} MiB of pods", FaultCode.PROTOCOL)
            try:
                page = orjson.loads(body)
                yield from page["items"]
                token = page["metadata"].get("continue") or ""
            except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
                raise SourceError("the answer is not a list of pods", FaultCode.PROTOCOL) from None
            if not token:
                return
            if time.monotonic_ns() >= deadline_ns:
                text = f"{client.configuration.host} has not listed all pods in time: raise --timeout"
                raise SourceError(text, FaultCode.TIMEOUT)

    def _refusal(self, status: int, body: bytes) -> SourceError:
        if status == 401:
            return SourceError(
                "the API server does not accept these credentials: kubectl auth whoami", FaultCode.NOT_PERMITTED
            )
        if status == 403:
            text = f"you may not list the pods: kubectl auth can-i list pods -n {self._target.namespace}"
            return SourceError(text, FaultCode.NOT_PERMITTED)
        try:
            message = str(orjson.loads(body)["message"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            message = body.decode(errors="replace")
        return SourceError(f"HTTP {status}: {message:.{_SHOWN}}")

    def _forward(self, client: Any, ports: Sequence[_PodPort], faults: list[Fault], deadline_ns: int) -> list[Endpoint]:
        """Returns the endpoints of relays to these ports, opens missing relays and closes those that nobody needs."""
        if len(ports) > _MOST_RELAYS:
            raise SourceError(
                f"{len(ports)} agents, and port-forward is for {_MOST_RELAYS} at most: run kvctl in a pod instead",
                FaultCode.PROTOCOL,
            )
        for known, relay in list(self._relays.items()):
            if known not in ports or relay.failed:
                relay.close()
                del self._relays[known]

        def opened(port: _PodPort) -> Relay | SourceError:
            def connect(timeout_s: float) -> PodStream:
                return PodStream(client.configuration, self._target.namespace, port.pod, port.port, timeout_s)

            try:
                return Relay(connect, max(0.05, (deadline_ns - time.monotonic_ns()) / 1e9))
            except SourceError as error:
                return error

        missing = [port for port in ports if port not in self._relays]
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            for port, outcome in zip(missing, pool.map(opened, missing), strict=True):
                if isinstance(outcome, Relay):
                    self._relays[port] = outcome
                else:
                    faults.append(Fault(port.name, outcome.code, str(outcome)))
        return [
            Endpoint(port.name, None, True, self._relays[port].address, port.node)
            for port in ports
            if port in self._relays
        ]


def current_namespace(context: str) -> str:
    """Returns the namespace of a context of the kubeconfig files, or of this pod; `default` where there is none."""
    try:
        return POD_NAMESPACE.read_text().strip() if _uses_service_account(context) else _context(context)[1]
    except (OSError, ValueError, AttributeError, TypeError):  # a source says what is wrong with the file
        return "default"


def _context(name: str) -> tuple[str, str]:
    """Returns name and namespace of a context: of `name`, else of the current one.

    As kubectl does, and unlike the package, it takes the current context of the first file that names one.
    """
    import yaml

    paths = [Path(path).expanduser() for path in _kubeconfig().split(os.pathsep) if path]
    try:
        files = [yaml.safe_load(path.read_text()) or {} for path in paths if path.exists()]
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    name = name or next((file["current-context"] for file in files if file.get("current-context")), "")
    contexts = (each for file in files for each in file.get("contexts") or () if each.get("name") == name)
    return name, next((each.get("context", {}).get("namespace") for each in contexts), "") or "default"


def _kubeconfig() -> str:
    """Returns the paths of the kubeconfig files; the package reads KUBECONFIG only when it is imported."""
    return os.environ.get("KUBECONFIG", "") or str(Path("~/.kube/config").expanduser())


def _uses_service_account(context: str) -> bool:
    """Returns whether this is a pod without a kubeconfig file, and no context is chosen."""
    files = (Path(file).expanduser() for file in _kubeconfig().split(os.pathsep) if file)
    return not context and "KUBERNETES_SERVICE_HOST" in os.environ and not any(file.exists() for file in files)


def _api_client(context: str) -> Any:
    """Returns an ApiClient for a context of the kubeconfig file, or for the service account of this pod.

    Raises:
        SourceError: there is neither, or the file cannot be used.
    """
    import kubernetes
    import yaml

    configuration = kubernetes.client.Configuration()
    config: Any = kubernetes.config
    try:
        if _uses_service_account(context):
            config.load_incluster_config(client_configuration=configuration)
        else:
            config.load_kube_config(_kubeconfig(), _context(context)[0] or None, configuration)
    except (config.ConfigException, OSError, yaml.YAMLError, ValueError, AttributeError, TypeError) as error:
        text = f"no usable kubeconfig: {error!s:.{_SHOWN}}; kubectl config get-contexts lists the contexts"
        raise SourceError(text) from None
    configuration.retries = False  # the deadline is ours
    return kubernetes.client.ApiClient(configuration)


def _ports(pod: Mapping[str, Any], target: _Target, faults: list[Fault]) -> list[_PodPort]:
    """Returns the admin endpoints of a pod; adds a fault if it has none or does not run."""
    spec, status, metadata = pod["spec"], pod.get("status", {}), pod["metadata"]
    name = metadata["name"]
    terminating = "deletionTimestamp" in metadata
    containers = [*spec["containers"], *spec.get("initContainers", ())]
    found = [
        (container["name"], port["containerPort"])
        for container in containers
        for port in container.get("ports", ())
        if _is_wanted(port, target.port)
    ]
    if not found and target.port.isdecimal():
        found = [(spec["containers"][0]["name"], int(target.port))]

    def problem(text: str) -> list[_PodPort]:
        if not terminating:  # its end is expected
            describe = f"kubectl describe pod {name} -n {target.namespace}"
            faults.append(Fault(name, FaultCode.UNREACHABLE, f"{text}; {describe}"))
        return []

    if not found and not target.selector:  # the pod of something else
        return []
    if not found:
        return problem(f"the pod has no container port named {target.port}")
    if status.get("phase") != "Running" or not status.get("podIP"):
        return problem(f"the pod is {str(status.get('phase', 'Unknown')).lower()}{_reason(status)}")
    states = {each["name"]: each["state"] for each in _container_statuses(status)}
    stopped = {container: state for container, _ in found if "running" not in (state := states.get(container, {}))}
    if stopped:
        container, state = next(iter(stopped.items()))
        return problem(f"container {container} does not run{_waiting(state)}")
    suffix = " (terminating)" if terminating else ""
    return [
        _PodPort(
            f"{name}{f':{port}' if len(found) > 1 else ''}{suffix}",
            name,
            metadata["uid"],
            status["podIP"],
            int(port),
            str(spec.get("nodeName", "")),
        )
        for _, port in found
    ]


def _is_wanted(port: Mapping[str, Any], wanted: str) -> bool:
    if wanted.isdecimal():
        return bool(port["containerPort"] == int(wanted))
    name = str(port.get("name", ""))
    return name == wanted or (name.startswith(f"{wanted}-") and name.removeprefix(f"{wanted}-").isdecimal())


def _container_statuses(status: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from status.get("containerStatuses", ())
    yield from status.get("initContainerStatuses", ())


def _reason(status: Mapping[str, Any]) -> str:
    """Returns why a pod does not run, with a leading separator; "" if that is unknown."""
    if text := status.get("message") or status.get("reason"):
        return f": {text:.{_SHOWN}}"
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f": {condition.get('message') or condition.get('reason', 'not scheduled'):.{_SHOWN}}"
    return next((text for each in _container_statuses(status) if (text := _waiting(each["state"]))), "")


def _waiting(state: Mapping[str, Any]) -> str:
    for kind in ("waiting", "terminated"):
        if kind in state:
            reason = state[kind].get("reason", kind)
            message = state[kind].get("message", "")
            return f": {reason}" + (f": {message:.{_SHOWN}}" if message else "")
    return ""
