# One image for every process of the platform; docker-compose.yml says which command each runs.
# --build-arg EXTRAS=worker,grammar makes the worker's (PyTorch, no Django), TORCH_INDEX names PyTorch's package index (plain
# indexes serve CUDA builds on Linux), SYSTEM Debian's packages that are needed too (Triton compiles with gcc).
FROM python:3.12-slim AS build
ARG EXTRAS="platform,grammar"
ARG TORCH_INDEX=""
WORKDIR /app
RUN python -m venv /venv
COPY pyproject.toml constraints.txt ./
COPY platform platform
COPY tenants tenants
COPY billing billing
COPY scheduler_engine scheduler_engine
COPY gpu_worker gpu_worker
RUN set -eu; pip="/venv/bin/pip install --no-cache-dir --constraint constraints.txt"; \
    case "$EXTRAS" in *worker*) [ -z "$TORCH_INDEX" ] || $pip --index-url "$TORCH_INDEX" torch;; esac; \
    $pip --editable ".[$EXTRAS]"

FROM python:3.12-slim
ARG SYSTEM=""
RUN [ -z "$SYSTEM" ] || (apt-get update && apt-get install --yes --no-install-recommends $SYSTEM && rm -rf /var/lib/apt/lists/*)
RUN useradd --create-home --uid 10001 rubato && mkdir -p /data/files /data/recorded && chown -R rubato /data
COPY --from=build /venv /venv
WORKDIR /app
COPY --from=build /app ./
COPY manage.py ./
COPY templates templates
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 RUBATO_DATA=/data MALLOC_ARENA_MAX=2
USER rubato
CMD ["granian", "--interface=asgi", "--loop=uvloop", "--http=1", "--http1-header-read-timeout=10000", "--backlog=4096", "--backpressure=8192", "--host=0.0.0.0", "--port=8000", "gateway.asgi:application"]
