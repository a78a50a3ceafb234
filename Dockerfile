# The page in a container. On the CPU, and with CUDA (the machine needs the NVIDIA container toolkit):
#   docker build -t decoding-playground .
#   docker build -t decoding-playground:cuda --build-arg DEVICE=cuda .
# It writes to /models (models from the hub, and those made there) and to /tmp only, so it runs on a read-only root:
#   docker run --read-only --tmpfs /tmp -v playground-models:/models -p 7860:7860 decoding-playground
FROM python:3.11-slim

# Programs that a model wrote are confined by a seccomp filter, which libseccomp compiles.
RUN apt-get update && apt-get install -y --no-install-recommends libseccomp2 && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --home-dir /models --no-create-home player && install -d -o player -g player /models
WORKDIR /opt/playground

# torch has a layer of its own: it is by far the largest, and the one that changes least. cpu: builds without CUDA.
ARG DEVICE=cpu
ARG CPU_INDEX=https://download.pytorch.org/whl/cpu
COPY requirements.txt .
RUN if [ "$DEVICE" = cpu ]; then export PIP_EXTRA_INDEX_URL="$CPU_INDEX"; fi; \
    grep '^torch' requirements.txt > torch.txt && pip install --no-cache-dir -r torch.txt && rm torch.txt
RUN pip install --no-cache-dir -r requirements.txt

COPY app.py LICENSE NOTICE SECURITY.md ./
COPY assets assets
COPY playground playground
COPY strategies strategies
RUN python -m compileall -q app.py playground strategies

# The NVIDIA variables say what the container toolkit passes in; without a GPU they mean nothing.
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    GRADIO_SERVER_NAME=0.0.0.0 \
    GRADIO_SERVER_PORT=7860 \
    HOME=/tmp \
    HF_HOME=/models/huggingface \
    PLAYGROUND_HOME=/models/playground \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER player
VOLUME /models
EXPOSE 7860
# Fails if a worker is dead or stuck, and while the page drains: SIGTERM ends all runs with a message within 5 s.
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:7860/health', timeout=4)"]
STOPSIGNAL SIGTERM
CMD ["python", "app.py"]
