# kvctl, the command line alone: no torch, no engine. Build it in the root of the checkout:
#   docker build -t registry.example/kvctl:0.1.0 .
# BASE may be any image with Python 3.11 or newer and its venv module. Beside it only a package registry is asked.
ARG BASE=python:3.12-slim
FROM ${BASE} AS build
COPY constraints.txt pyproject.toml README.md LICENSE /src/
COPY release /src/release
COPY kvctl /src/kvctl
COPY kvctl_agent /src/kvctl_agent
RUN python3 -m venv /build && \
    /build/bin/python -m pip install --no-cache-dir -c /src/release/requirements.txt setuptools tomli-w wheel && \
    /build/bin/python /src/release/wheels.py --command-line --out /wheels
# Removed again: pip, and an asynchronous copy of the Kubernetes client (38 MB).
RUN python3 -m venv /opt/kvctl && \
    /opt/kvctl/bin/python -m pip install --no-cache-dir --no-compile -c /src/constraints.txt \
        "$(ls /wheels/kvctl-*.whl)[kubernetes]" && \
    /opt/kvctl/bin/python -m pip uninstall --yes pip setuptools && \
    rm -r /opt/kvctl/lib/python*/site-packages/kubernetes/aio

FROM ${BASE}
COPY --from=build /opt/kvctl /opt/kvctl
# The user has no home: what kvctl remembers of agents is below /tmp.
ENV PATH=/opt/kvctl/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
ENTRYPOINT ["kvctl"]
