# Two images of the same code:
#   light   gateway, tasktype, scheduler and key management; no torch
#   torch   worker and predictor; PyTorch for CUDA, which runs on a CPU too
#
#   docker build --target light --tag greenroom-light .
#   docker build --target torch --tag greenroom-torch .
#   docker build --target torch --tag greenroom-torch --build-arg TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu .
#
# The last one has no CUDA and is 4 GB smaller. A release names its base by digest, so that it can be made again:
#
#   docker build --target light --build-arg BASE_IMAGE=python:3.11-slim@sha256:... .
#
# Whatever pip installs is checked against the hashes of deploy/image (`make pins`), from whichever index it comes:
# PIP_INDEX_URL names a mirror. Nothing here needs BuildKit. What changes seldom comes first, so that a change of the code
# makes one small layer anew.

ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    GREENROOM_CACHE=/var/cache/greenroom \
    HF_HOME=/var/cache/greenroom/huggingface \
    XDG_CACHE_HOME=/var/cache/greenroom \
    TRITON_CACHE_DIR=/var/cache/greenroom/triton \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/greenroom/inductor \
    GREENROOM_HEALTH_URL=http://127.0.0.1:8080/health
# The folders that are written to. A named volume that is mounted on one of them begins as a copy of it, owner included;
# so the file of API keys begins with none in it, and services' certificates belong to who makes them. openssl makes those:
# every image that has certificates of authorities has it.
RUN openssl version \
 && groupadd --system --gid 10001 greenroom \
 && useradd --system --uid 10001 --gid greenroom --home-dir /var/lib/greenroom --shell /usr/sbin/nologin greenroom \
 && install -d -o greenroom -g greenroom -m 0750 \
      /var/cache/greenroom /var/lib/greenroom /var/lib/greenroom/keys /var/lib/greenroom/predictor \
      /var/lib/greenroom/authority /var/lib/greenroom/kafka-user \
 && for service in kafka gateway tasktype scheduler predictor worker; do \
      install -d -o greenroom -g greenroom -m 0750 "/var/lib/greenroom/identities/${service}"; \
    done \
 && printf '{"version": 1, "keys": []}\n' > /var/lib/greenroom/keys/keys.json \
 && chown greenroom:greenroom /var/lib/greenroom/keys/keys.json \
 && chmod 0600 /var/lib/greenroom/keys/keys.json

FROM base AS wheel
ARG PIP_INDEX_URL
WORKDIR /build
COPY deploy/image/build.txt ./
RUN pip install --no-cache-dir --no-deps --require-hashes --requirement build.txt
# A Python of Debian's own, where the base image has that, keeps its headers in a package.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ libc6-dev \
 && if ! test -e "$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h"; then \
      apt-get install --yes --no-install-recommends python3-dev; \
    fi \
 && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml setup.py README.md LICENSE ./
COPY services services
# The compiled products are optional for greenroom, and not for its image.
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . \
 && python -m zipfile -l /wheels/greenroom-*.whl > contents.txt \
 && grep -q native/_rows contents.txt

FROM base AS light-requirements
ARG PIP_INDEX_URL
COPY deploy/image/light.txt /usr/local/share/greenroom/light.txt
RUN pip install --no-cache-dir --no-deps --require-hashes --requirement /usr/local/share/greenroom/light.txt

FROM light-requirements AS light
COPY deploy/image/certificates.py deploy/image/health.py /usr/local/share/greenroom/
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --no-deps /wheels/*.whl
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="greenroom" \
      org.opencontainers.image.description="Gateway, task types and scheduler of greenroom, without torch" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
EXPOSE 7000 8000 8001 8080
USER 10001:10001
WORKDIR /var/lib/greenroom
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
  CMD ["python", "-I", "/usr/local/share/greenroom/health.py"]
ENTRYPOINT ["greenroom"]
CMD ["--help"]

FROM light-requirements AS torch-requirements
ARG PIP_INDEX_URL
ARG TORCH_INDEX_URL=
COPY deploy/image/torch.txt deploy/image/models.txt /usr/local/share/greenroom/
# Another index has other builds of torch, whose hashes are not ours to know: of those the versions are held.
RUN if test -n "${TORCH_INDEX_URL}"; then \
      grep --only-matching '^[^ #]*==[^ ;]*' /usr/local/share/greenroom/torch.txt > /tmp/versions.txt \
      && pip install --no-cache-dir --constraint /tmp/versions.txt --index-url "${TORCH_INDEX_URL}" torch \
      && rm /tmp/versions.txt; \
    else \
      pip install --no-cache-dir --no-deps --require-hashes --requirement /usr/local/share/greenroom/torch.txt; \
    fi \
 && pip install --no-cache-dir --no-deps --require-hashes --requirement /usr/local/share/greenroom/models.txt

FROM torch-requirements AS torch
COPY deploy/image/health.py /usr/local/share/greenroom/health.py
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --no-deps /wheels/*.whl
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="greenroom-torch" \
      org.opencontainers.image.description="Worker and predictor of greenroom" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
EXPOSE 7000 8000 8080
USER 10001:10001
WORKDIR /var/lib/greenroom
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
  CMD ["python", "-I", "/usr/local/share/greenroom/health.py"]
ENTRYPOINT ["greenroom"]
CMD ["--help"]
