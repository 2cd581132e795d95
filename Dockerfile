# An image to train in, from a clone: docker build -t longctx-patch .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 -v $PWD:/work longctx-patch doctor
# torch's own packages bring CUDA and NCCL; the host has the driver and NVIDIA's container toolkit.
FROM python:3.12-slim

# Triton compiles its launchers with a C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/longctx-patch
COPY setup.py pyproject.toml README.md LICENSE ./
COPY longctx_patch longctx_patch
COPY cli cli
COPY recipes recipes
RUN pip install --no-cache-dir ".[fa4,liger,trl,4bit,eval,draw]"

WORKDIR /work
ENTRYPOINT ["longctx"]
CMD ["doctor"]
