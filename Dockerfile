# PYTHON_IMAGE: any Debian image whose python3 is 3.11 or newer and has venv.
# PIP_ARGS: options for pip, for example the index of torch's CPU builds (a quarter of the size).
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
ARG PIP_ARGS=""
RUN python3 -m venv /opt/draftwire
WORKDIR /src
# The dependencies by themselves first: they change less often than the source.
COPY pyproject.toml constraints.txt ./
RUN python3 -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
    | /opt/draftwire/bin/pip install --no-cache-dir ${PIP_ARGS} -c constraints.txt -r /dev/stdin
COPY . .
# A wheel, with the kernels compiled for every instruction set, is the only thing installed of it.
RUN /opt/draftwire/bin/pip wheel --no-cache-dir ${PIP_ARGS} --no-deps --wheel-dir /wheels . \
    && /opt/draftwire/bin/pip install --no-cache-dir --no-deps /wheels/*.whl

FROM ${PYTHON_IMAGE}
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/draftwire /opt/draftwire
ENV PATH=/opt/draftwire/bin:$PATH \
    DRAFTWIRE_HOME=/var/lib/draftwire
RUN useradd --uid 10001 --home-dir /var/lib/draftwire --no-create-home draftwire \
    && install --directory --owner draftwire --group draftwire /var/lib/draftwire
USER draftwire
WORKDIR /var/lib/draftwire
# Models are fetched once and kept here.
VOLUME /var/lib/draftwire
EXPOSE 50051
# Serving is what counts; the first start has a model to fetch.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python3", "-m", "service.cli.health"]
ENTRYPOINT ["draftwire"]
CMD ["serve", "--listen", "0.0.0.0:50051"]
