# One image, two roles: `tollgate gateway` and `tollgate engine` (see compose.yaml).
FROM python:3.11-slim-bookworm

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1

# It keeps MCP servers that are processes from what is the gateway's: nobody here is root.
# Debian keeps one version of it a release, and mends that: a pinned one would be gone with the next mend.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends bubblewrap \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/tollgate

# The dependencies first: they change less often than the code. torch's CPU build comes from PyTorch's own index.
COPY requirements requirements
RUN pip install --no-cache-dir -r requirements/uv.txt \
 && uv pip install --system --no-cache --torch-backend cpu --no-deps -r requirements/torch.txt \
 && pip install --no-cache-dir --require-hashes --no-deps -r requirements/runtime.lock

COPY pyproject.toml README.md ./
COPY foundation foundation
COPY engine engine
COPY gateway gateway
COPY billing billing
COPY mcp_bridge mcp_bridge
COPY migrations migrations
COPY models models
RUN pip install --no-cache-dir --no-deps --no-build-isolation -e . \
 && useradd --system --home-dir /var/lib/tollgate --create-home tollgate

USER tollgate
ENV TOLLGATE_HOME=/var/lib/tollgate
VOLUME /var/lib/tollgate
EXPOSE 8000
ENTRYPOINT ["tollgate"]
CMD ["up", "--host", "0.0.0.0"]
