# A server on CPUs. Build and run:
#
#   docker build -t bloombee .
#   docker run -p 31337:31337 -p 31338:31338 -v bloombee:/home/bee bloombee \
#       --model HUB_ID --initial-peers MADDR --dht-port 31337 --port 31338 \
#       --announce PUBLIC_ADDRESS --identity /home/bee/identity.key
#
# PyPI's torch for x86-64 brings CUDA along (several GB). For the small build, name PyTorch's
# index of CPU wheels: docker build --build-arg PIP_EXTRA_INDEX=... -t bloombee .

FROM python:3.11-slim AS build
ARG PIP_EXTRA_INDEX=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/bloombee
ENV PATH=/opt/bloombee/bin:$PATH
WORKDIR /source
COPY constraints.txt ./
RUN pip install ${PIP_EXTRA_INDEX:+--extra-index-url "$PIP_EXTRA_INDEX"} -c constraints.txt torch
COPY . ./
RUN pip install -c constraints.txt .

FROM python:3.11-slim
RUN useradd --create-home --uid 1000 bee
COPY --from=build /opt/bloombee /opt/bloombee
ENV PATH=/opt/bloombee/bin:$PATH PYTHONUNBUFFERED=1
USER bee
WORKDIR /home/bee
# The server writes the ready file once it serves. It lies in memory, so a restart begins without it.
HEALTHCHECK --start-period=30m --interval=30s --timeout=10s CMD test -e /dev/shm/ready.json
STOPSIGNAL SIGTERM
ENTRYPOINT ["bloombee-server", "--ready-file", "/dev/shm/ready.json"]
