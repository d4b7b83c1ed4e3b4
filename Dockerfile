# One image, several roles: `tollgate up`, `gateway`, `engine`, `migrate` (compose.yaml, deploy/kubernetes).
FROM python:3.11-slim-bookworm AS build

# An image's files are read by users who cannot write beside them.
ENV UV_COMPILE_BYTECODE=1 \
    UV_LINK_MODE=copy \
    UV_NO_CACHE=1

WORKDIR /build

# The dependencies first: they change less often than the code. torch's CPU build comes from PyTorch's own index.
COPY requirements requirements
RUN pip install --no-cache-dir --require-hashes -r requirements/uv.txt \
 && uv venv /opt/tollgate \
 && uv pip install --python /opt/tollgate --torch-backend cpu --no-deps -r requirements/torch.txt \
 && uv pip install --python /opt/tollgate --require-hashes --no-deps -r requirements/runtime.lock

COPY pyproject.toml README.md LICENSE ./
COPY foundation foundation
COPY engine engine
COPY gateway gateway
COPY billing billing
COPY mcp_bridge mcp_bridge
COPY migrations migrations
COPY models models
RUN uv build --wheel --no-build-isolation --python /opt/tollgate --out-dir dist . \
 && uv pip install --python /opt/tollgate --no-deps dist/*.whl

FROM python:3.11-slim-bookworm

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PATH=/opt/tollgate/bin:$PATH \
    TOLLGATE_HOME=/var/lib/tollgate

# It keeps MCP servers that are processes from what is the gateway's: nobody here is root.
# Debian keeps one version of it a release, and mends that: a pinned one would be gone with the next mend.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends bubblewrap \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --home-dir /var/lib/tollgate --create-home tollgate

COPY --from=build /opt/tollgate /opt/tollgate

# A number, by which Kubernetes sees that it is not root's.
USER 10001
# tollgate.toml is looked for here.
WORKDIR /etc/tollgate
VOLUME /var/lib/tollgate
EXPOSE 8000
ENTRYPOINT ["tollgate"]
CMD ["up", "--host", "0.0.0.0"]
