"""Which kernels are compiled, and for which targets."""

load("//third_party/cuda:cuda.bzl", "cuda_image")

# compute_70 is PTX of the oldest target, which every newer device accepts;
# compute_89 is for devices newer than this list.
_PLAIN_ARCHS = ["sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "compute_70"]
_MMA_ARCHS = ["sm_80", "sm_86", "sm_89", "sm_100", "sm_120", "compute_89"]
_CACHE_TYPES = {"e4m3": "E4m3", "e5m2": "E5m2", "f16": "Half", "bf16": "Bfloat"}
_DIMS = [64, 128, 256]

def plain_images():
    """Declares the kernels that need nothing of an architecture.

    Returns:
      Their labels.
    """
    names = ["runtime", "scalar", "cache_write", "states"]
    for name in names:
        cuda_image(
            name = name,
            src = "device/%s.cu" % name,
            hdrs = [":device_sources"],
            archs = _PLAIN_ARCHS,
            tags = ["manual"],
            visibility = ["//native/cuda:__subpackages__"],
        )
    return [":" + name for name in names]

def grouped_images():
    """Declares the tensor-core kernels by cache type and head dimension.

    Returns:
      Their labels.
    """
    labels = []
    for family in ["grouped_sm80", "grouped_sm90"]:
        for kv, traits in _CACHE_TYPES.items():
            archs = ["sm_90a"] if family == "grouped_sm90" else _MMA_ARCHS
            for dim in _DIMS:
                name = "%s_%s_d%d" % (family, kv, dim)
                cuda_image(
                    name = name,
                    src = "device/%s.cu" % family,
                    hdrs = [":device_sources"],
                    archs = archs,
                    tags = ["manual"],
                    visibility = ["//native/cuda:__subpackages__"],
                    defines = [
                        "FV_KV=flashverify::cuda::" + traits,
                        "FV_KV_NAME=" + kv,
                        "FV_DIM=%d" % dim,
                        "FV_LEGACY=%d" % (1 if kv.startswith("e") else 0),
                    ],
                )
                labels.append(":" + name)
    return labels

def reviewed_images():
    """Names the images whose registers and spills are worth a review.

    Returns:
      Their labels.
    """
    return [":scalar", ":cache_write", ":states"] + [
        ":grouped_sm90_%s_d%d" % (kv, dim)
        for kv in _CACHE_TYPES
        for dim in _DIMS
    ]

def all_images(package):
    """Names all images, for tables outside this package.

    Args:
      package: this package, "//native/cuda".

    Returns:
      Their labels.
    """
    return [package + ":" + name for name in ["runtime", "scalar", "cache_write", "states"]] + [
        "%s:%s_%s_d%d" % (package, family, kv, dim)
        for family in ["grouped_sm80", "grouped_sm90"]
        for kv in _CACHE_TYPES
        for dim in _DIMS
    ]
