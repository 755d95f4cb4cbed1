#!/usr/bin/env bash
# Make an environment of its own for SGLang servers, which pin other packages than the trainer has.
#   usage: launch/sglang.sh [FOLDER]      (default: sglang-env, where rollout.sglang.environment looks)
# FOLDER then has venv/ and serve.sh, by which mppo starts servers. With a GPU that is SGLang as it comes; without one
# the same server on the CPU, with stand-ins (launch/sglang_cpu/) for packages that exist for CUDA only.
#   PYTHON                 the Python that the environment is made with: 3.11 or 3.12
#   CUDA_VISIBLE_DEVICES   empty: for the CPU, whatever there is
#   TORCH                  what pip is to install for torch on the CPU (default: torch==2.13.0, unless that needs CUDA)
# Idempotent. An environment that was not finished, or of other packages, is made anew.
set -euo pipefail
launch=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
version=0.5.23
unset PYTHONPATH PYTHONHOME # packages of another environment would count as installed

# For the CPU. The second list goes in without its dependencies, which are CUDA builds of torch, triton and kernels.
resolved=(
  transformers==5.19.0 tokenizers==0.23.2 numpy==2.4.6 aiohttp fastapi==0.165.0 uvicorn==0.54.0 uvloop==0.23.0
  pyzmq==27.3.0 msgspec==0.23.0 orjson pydantic==2.14.4 pybase64 setproctitle pillow einops python-multipart requests
  psutil apache-tvm-ffi==0.1.11 dill==0.4.1 loguru jsonschema soundfile==0.13.1 sentencepiece partial-json-parser
  IPython sniffio distro jiter httpx
)
alone=(
  "sglang==$version" torchvision==0.28.0 xgrammar==0.2.7 gguf==0.19.0 compressed-tensors==0.18.0 openai==2.8.0
)

say() { echo "== sglang.sh: $*"; }
fail() {
  echo "!! sglang.sh: $*" >&2
  exit 1
}
stage="looking at the machine"
trap 'echo "!! sglang.sh: failed while $stage, see above; the next run makes the environment anew" >&2' ERR
begin() {
  stage=$*
  say "$stage (${SECONDS} s)"
}

device=cpu
if [ -n "${CUDA_VISIBLE_DEVICES-all}" ] && nvidia-smi --list-gpus 2>/dev/null | grep -q GPU; then device=gpu; fi
mkdir -p "${1:-sglang-env}"
folder=$(cd "${1:-sglang-env}" && pwd)
venv=$folder/venv
if [ ! -e "$folder/.lock" ] && [ -n "$(ls -A "$folder")" ]; then
  fail "$folder is not empty, and this script did not make it: name another folder"
fi
# Another run may be at work, or a pip that an interrupted one left.
exec 9>"$folder/.lock"
flock --nonblock 9 || { say "waiting for another run in $folder" && flock 9; }

# What makes a server, beside its packages. Replaced only where they differ, since a server may run from them.
copy_if_changed() {
  diff -rq -x __pycache__ "$1" "$2" >/dev/null 2>&1 && return
  rm -rf "$2.new" && cp -r "$1" "$2.new" && rm -rf "$2" && mv "$2.new" "$2"
}
if [ $device = cpu ]; then copy_if_changed "$launch/sglang_cpu" "$folder/stubs"; else rm -rf "$folder/stubs"; fi
copy_if_changed "$launch/sglang_serve.sh" "$folder/serve.sh"

made_of="sglang $version for $device, $(echo "${resolved[*]} ${alone[*]}" | cksum)"
if [ "$(cat "$folder/installed" 2>/dev/null)" = "$made_of" ] && [ -x "$venv/bin/python" ]; then
  say "$folder is ready"
  exit 0
fi

python=${PYTHON:-$(command -v python3.11 || command -v python3.12 || command -v python3)} || fail "there is no python3"
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' ||
  fail "$python is not Python 3.11 or 3.12: name one by PYTHON"
"$python" -c 'import ensurepip, venv' || fail "$python makes no virtual environments: install its venv package"

begin "making $venv for the $device with $("$python" --version)"
rm -rf "$folder/installed" "$venv"
"$python" -m venv "$venv"
pip() { "$venv/bin/pip" install -qq --disable-pip-version-check "$@"; }

if [ $device = gpu ]; then
  begin "installing SGLang $version with its CUDA packages, many gigabytes"
  pip "sglang==$version"
else
  if [ -z "${TORCH:-}" ]; then
    begin "seeing that torch is to be had without CUDA"
    report=$(pip --dry-run --report - torch==2.13.0)
    if grep -q '"name": "nvidia-' <<<"$report"; then
      fail "here torch==2.13.0 needs gigabytes of CUDA packages: point pip at an index of CPU builds" \
        "(PIP_EXTRA_INDEX_URL), or say what to install by TORCH (TORCH=torch==2.13.0 takes them)"
    fi
  fi
  begin "installing ${TORCH:-torch==2.13.0}"
  pip "${TORCH:-torch==2.13.0}"
  begin "installing what SGLang imports"
  pip "${resolved[@]}"
  begin "installing SGLang $version"
  pip --no-deps "${alone[@]}"
fi

begin "importing the server"
if [ $device = cpu ]; then export PYTHONPATH=$folder/stubs SGLANG_USE_CPU_ENGINE=1; fi
"$venv/bin/python" -W ignore -c 'import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler'
echo "$made_of" >"$folder/installed"
say "$folder is ready ($SECONDS s)"
