# evenrank on PyTorch's CUDA build, for training. The host needs a driver and the NVIDIA Container Toolkit; the libraries of
# CUDA come with PyTorch.
#
#     docker build --file docker/cuda.Dockerfile --tag evenrank:cuda .
#     docker run --rm --gpus all --ipc host --volume "$PWD:/home/evenrank/job" evenrank:cuda torchrun job/train.py
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
# One of constraints/.
ARG RELEASE=torch213
ENV VIRTUAL_ENV=/opt/evenrank \
    UV_NO_CACHE=1 \
    UV_LINK_MODE=copy
WORKDIR /src
RUN python3 -m venv /opt/tools \
    && /opt/tools/bin/python -m pip install --no-cache-dir "uv>=0.9" \
    && python3 -m venv "$VIRTUAL_ENV"
# PyTorch and the other dependencies are layers of their own: a change of the code builds the last one only.
COPY constraints constraints/
RUN /opt/tools/bin/uv pip install torch --constraint "constraints/${RELEASE}.txt"
COPY pyproject.toml requirements-dev.lock ./
RUN /opt/tools/bin/uv pip install --requirements pyproject.toml --extra train --extra tensorboard \
        --constraint requirements-dev.lock --constraint "constraints/${RELEASE}.txt" \
    && /opt/tools/bin/uv pip check
COPY . .
# A user's machine code begins as a copy of the image's, where the CPU is of the same kind.
RUN /opt/tools/bin/uv pip install --no-deps . \
    && "$VIRTUAL_ENV/bin/evenrank" warmup

FROM ${PYTHON_IMAGE}
# Triton compiles the launchers of its kernels with a C compiler when they are first used.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 1000 --create-home evenrank
COPY --from=build /opt/evenrank /opt/evenrank
ENV PATH=/opt/evenrank/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000:1000
WORKDIR /home/evenrank
CMD ["evenrank", "--help"]
