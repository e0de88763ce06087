# The tool for a CPU. Not built in CI: mind it when the dependencies change.
#
#   docker build -t histograph-post .
#   docker run --rm -v "$PWD":/work histograph-post demo
FROM python:3.11-slim
# What RDKit draws molecules with.
RUN apt-get update && apt-get install -y --no-install-recommends libexpat1 libxext6 libxrender1 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/histograph-post
COPY . .
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    -c constraints.txt '.[chem,fast,report,tune]'
# numba keeps compiled kernels beside the package or, where that is read-only, here.
ENV NUMBA_CACHE_DIR=/tmp/numba
WORKDIR /work
ENTRYPOINT ["histograph"]
