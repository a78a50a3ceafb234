# The page for a machine of your own: docker build -t decoding-playground . && docker run -p 7860:7860 decoding-playground
FROM python:3.11-slim

# Programs that a model wrote are confined by a seccomp filter, which libseccomp compiles.
RUN apt-get update && apt-get install -y --no-install-recommends libseccomp2 && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 player
WORKDIR /home/player/playground
ENV PYTHONUNBUFFERED=1 \
    GRADIO_SERVER_NAME=0.0.0.0 \
    GRADIO_SERVER_PORT=7860 \
    HF_HOME=/home/player/models
# Models from the hub land in a volume and stay.
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt
COPY --chown=player . .
RUN mkdir -p "$HF_HOME" && chown -R player "$HF_HOME"

USER player
VOLUME /home/player/models
EXPOSE 7860
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD python -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:7860/health', timeout=4)"
CMD ["python", "app.py"]
