# An image with the command moe-lab, for GPUs or the CPU. Untried: nothing here could build it.
#   docker build -t moe_lab .
#   docker run --rm --gpus all -v "$PWD:/work" moe_lab run +experiment=task_agnostic
FROM python:3.12-slim-bookworm
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap \
    && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip install --no-cache-dir -c /src/constraints.txt /src && rm -rf /src
WORKDIR /work
ENTRYPOINT ["moe-lab"]
CMD ["--help"]
