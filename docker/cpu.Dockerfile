# evenrank on PyTorch's CPU build: preprocessing, reports, planning, and training without GPUs.
#
#     docker build --file docker/cpu.Dockerfile --tag evenrank:cpu .
#     mkdir -p out
#     docker run --rm --user "$(id -u):$(id -g)" --volume "$PWD/out:/home/evenrank/out" evenrank:cpu preprocess --dataset synthetic
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
# One of constraints/, and what installs PyTorch's CPU build.
ARG RELEASE=torch213
ARG INSTALL_TORCH="/opt/tools/bin/uv pip install --torch-backend=cpu"
ENV VIRTUAL_ENV=/opt/evenrank \
    UV_NO_CACHE=1 \
    UV_LINK_MODE=copy
WORKDIR /src
RUN python3 -m venv /opt/tools \
    && /opt/tools/bin/python -m pip install --no-cache-dir "uv>=0.9" \
    && python3 -m venv "$VIRTUAL_ENV"
# PyTorch and the other dependencies are layers of their own: a change of the code builds the last one only.
COPY constraints constraints/
RUN PATH="$VIRTUAL_ENV/bin:$PATH" ${INSTALL_TORCH} torch --constraint "constraints/${RELEASE}.txt"
COPY pyproject.toml requirements-dev.lock ./
RUN /opt/tools/bin/uv pip install --requirements pyproject.toml --extra train --extra preprocess --extra reports \
        --constraint requirements-dev.lock --constraint "constraints/${RELEASE}.txt" "./constraints/${RELEASE}-cpu" \
    && /opt/tools/bin/uv pip check
COPY . .
# A user's machine code begins as a copy of the image's, where the CPU is of the same kind.
RUN /opt/tools/bin/uv pip install --no-deps . \
    && "$VIRTUAL_ENV/bin/evenrank" warmup

FROM ${PYTHON_IMAGE}
RUN useradd --uid 1000 --create-home evenrank
COPY --from=build /opt/evenrank /opt/evenrank
ENV PATH=/opt/evenrank/bin:$PATH
USER 1000:1000
WORKDIR /home/evenrank
ENTRYPOINT ["evenrank"]
CMD ["--help"]
