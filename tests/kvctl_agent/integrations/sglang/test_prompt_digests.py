"""The trace context of a request comes from SGLang's own span of it."""

from __future__ import annotations

import subprocess
import sys

from tests.support.sglang import pair

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
# SGLang exports over gRPC, whose exporter is not installed here; nothing is exported.
SCRIPT = f"""
import os, pickle, sys
from types import ModuleType, SimpleNamespace
from tests.support.sglang import stand_ins
stand_ins.install()
package = "opentelemetry.exporter.otlp.proto.grpc"
exporter = ModuleType(package + ".trace_exporter")
exporter.OTLPSpanExporter = None
sys.modules |= {{package: ModuleType(package), package + ".trace_exporter": exporter}}
import sglang.srt.observability.trace as tracing
from opentelemetry.sdk.trace import TracerProvider
from kvctl_agent.integrations.sglang.prompt_digests import prompt_of
tracing.opentelemetry_initialized, tracing.tracer = True, TracerProvider().get_tracer("test")
tracing.set_global_trace_level(3)
tracing.trace_set_thread_info("tokenizer", 0, 0)
context = tracing.TraceReqContext("cmpl-1", 7, "prefill", "request", {{"traceparent": "00-{TRACE}-{PARENT}-01"}})
context.trace_req_start()
in_scheduler = pickle.loads(pickle.dumps(context))
for each in (in_scheduler, tracing.TraceNullContext()):
    request = SimpleNamespace(
        rid="cmpl-1", time_stats=SimpleNamespace(trace_ctx=each), origin_input_ids=[1, 2], lora_id=None
    )
    print(repr(prompt_of(None, request, 2).traceparent))
print(f"{{context.root_span.get_span_context().span_id:016x}}", flush=True)
os._exit(0)  # SGLang's contexts import its modules when they are freed
"""


def test_a_traced_request_passes_the_span_of_sglang_below_that_of_the_client() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"PYTHONPATH": f"{pair.FOLDER}:{':'.join(filter(None, sys.path))}", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    traced, untraced, span = ran.stdout.split()
    assert traced == repr(f"00-{TRACE}-{span}-01")
    assert span != PARENT
    assert untraced == "''"
