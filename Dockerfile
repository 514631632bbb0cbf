# One image for both halves; the command chooses: `engine`, `gateway` or (the default) `serve`.
#   docker build -t fulcrum .
#   docker run --rm --init --stop-timeout 45 -p 127.0.0.1:8000:8000 -p 127.0.0.1:50051:50051 -e FULCRUM_API_KEY=choose-one fulcrum
FROM python:3.12-slim-bookworm

# The usual torch wheel runs on CUDA and on CPUs. For a smaller image without CUDA:
#   docker build --build-arg PIP_EXTRA_INDEX_URL=... .   (PyTorch's index of CPU wheels)
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

# Triton compiles its launchers with the system's C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

WORKDIR /app
# Dependencies first: they change less often than the code.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = p['optional-dependencies']; \
print('\n'.join(p['dependencies'] + extras['engine'] + extras['gateway'] + extras['otel']))" > deps.txt \
    && pip install -c constraints.txt -r deps.txt
COPY proto proto
COPY telemetry telemetry
COPY kernels kernels
COPY engine engine
COPY service service
COPY gateway gateway
COPY loadtest loadtest
COPY cli cli
RUN pip install -c constraints.txt '.[engine,gateway,otel]'

RUN useradd --create-home --uid 10001 fulcrum && install -d -o fulcrum -g fulcrum /models /cache
USER 10001
WORKDIR /home/fulcrum
# What is written lies in /cache and /tmp: the rest may be read-only.
ENV FULCRUM_CACHE=/cache HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton \
    FULCRUM_HOST=0.0.0.0 FULCRUM_METRICS_HOST=0.0.0.0
VOLUME ["/cache"]
EXPOSE 8000 50051

# For the gateway's side; deploy/ has the engine's. (podman and buildah leave it out, unless they build with --format docker.)
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:8000/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["fulcrum"]
CMD ["serve"]
