# One image for all roles: API, controller, Ray's head, parameter server, worker, and both Redis
# servers, which the package includes. The command selects the role:
#
#   docker build -t vcasgd .
#   docker run --rm vcasgd vcasgd demo
#
# BASE is any Debian or Ubuntu with Python 3.11 or newer and its venv module. PIP_OPTIONS goes to
# pip, for example an index with another build of torch.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
ARG PIP_OPTIONS=""
WORKDIR /src
COPY constraints.txt pyproject.toml hatch_build.py README.md LICENSE ./
COPY vcasgd vcasgd
COPY examples/digits examples/digits
COPY dashboard dashboard
RUN python3 -m venv /opt/vcasgd \
 && /opt/vcasgd/bin/python -m pip install --no-cache-dir --constraint constraints.txt \
      ${PIP_OPTIONS} ".[stack,aws,gcp,kubernetes,examples]"
# Files that only compilers, tests, and unused parts of Ray need.
RUN cd /opt/vcasgd/lib/python3*/site-packages \
 && rm -rf torch/include torch/share torch/test \
      ray/jars ray/cpp ray/include ray/rllib ray/dashboard/client \
 && find torch/bin -type f ! -name torch_shm_manager -delete \
 && find scipy sklearn -type d -name tests -prune -exec rm -rf {} +

FROM ${BASE}
LABEL org.opencontainers.image.title="vcasgd" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --no-create-home --home-dir /var/lib/vcasgd vcasgd \
 && install -d -o vcasgd -m 750 /var/lib/vcasgd /var/lib/vcasgd/ledger /var/lib/vcasgd/storage \
      /run/vcasgd /run/vcasgd-tensors
COPY --from=build /opt/vcasgd /opt/vcasgd
COPY infra/redis /etc/vcasgd
COPY infra/docker/health /usr/local/bin/vcasgd-health
COPY infra/docker/redis /usr/local/bin/vcasgd-redis
ENV PATH=/opt/vcasgd/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    VCASGD_HOME=/var/lib/vcasgd
USER vcasgd
WORKDIR /var/lib/vcasgd
EXPOSE 8700
# Checks the role that the container runs.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["vcasgd-health"]
CMD ["vcasgd", "up", "--foreground"]
