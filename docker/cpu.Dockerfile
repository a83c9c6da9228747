# evenrank on PyTorch's CPU build: preprocessing, reports, planning, and training without GPUs.
#
#     docker build --file docker/cpu.Dockerfile --tag evenrank:cpu .
#     mkdir -p out
#     docker run --rm --user "$(id -u):$(id -g)" --volume "$PWD/out:/home/evenrank/out" evenrank:cpu preprocess --dataset synthetic
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
# The releases of core/torch_releases.py, and what installs PyTorch's CPU build.
ARG TORCH=2.13.0
ARG FBGEMM=1.8.0
ARG TORCHREC=1.8.0
ARG INSTALL_TORCH="/opt/tools/bin/uv pip install --torch-backend=cpu"
ENV VIRTUAL_ENV=/opt/evenrank \
    UV_NO_CACHE=1 \
    UV_LINK_MODE=copy
WORKDIR /src
RUN python3 -m venv /opt/tools \
    && /opt/tools/bin/python -m pip install --no-cache-dir "uv>=0.9" \
    && python3 -m venv "$VIRTUAL_ENV"
# PyTorch and the other dependencies are layers of their own: a change of the code builds the last one only.
RUN PATH="$VIRTUAL_ENV/bin:$PATH" ${INSTALL_TORCH} "torch==${TORCH}"
COPY pyproject.toml requirements-dev.lock ./
RUN /opt/tools/bin/uv pip install --requirements pyproject.toml --extra cpu --extra preprocess --extra reports \
        --constraints requirements-dev.lock "fbgemm-gpu-cpu==${FBGEMM}" \
    && /opt/tools/bin/uv pip install --no-deps "torchrec==${TORCHREC}"
COPY . .
RUN /opt/tools/bin/uv pip install --no-deps .

FROM ${PYTHON_IMAGE}
RUN useradd --uid 1000 --create-home evenrank
COPY --from=build /opt/evenrank /opt/evenrank
ENV PATH=/opt/evenrank/bin:$PATH
USER 1000:1000
WORKDIR /home/evenrank
ENTRYPOINT ["evenrank"]
CMD ["--help"]
