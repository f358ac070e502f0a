"""Which kernels are compiled, and for which targets."""

load("//third_party/cuda:cuda.bzl", "cuda_image")

# compute_70 is PTX of the oldest target, which every newer device accepts;
# compute_89 is for devices newer than this list.
_PLAIN_ARCHS = ["sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "compute_70", "compute_89"]
_GROUPED_ARCHS = {
    "grouped_sm70": ["sm_70", "sm_75", "compute_70"],
    "grouped_sm80": ["sm_80", "sm_86", "sm_89", "sm_100", "sm_120", "compute_89"],
    "grouped_sm90": ["sm_90a"],
}
_CACHE_TYPES = {"e4m3": "E4m3", "e5m2": "E5m2", "f16": "Half", "bf16": "Bfloat"}
_DIMS = [64, 128, 256]

def _grouped_instances():
    # (family, cache type, dim); the tensor cores before sm_80 know no bfloat16.
    return [
        (family, kv, dim)
        for family in _GROUPED_ARCHS
        for kv in _CACHE_TYPES
        for dim in _DIMS
        if (family, kv) != ("grouped_sm70", "bf16")
    ]

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
    for family, kv, dim in _grouped_instances():
        name = "%s_%s_d%d" % (family, kv, dim)
        cuda_image(
            name = name,
            src = "device/%s.cu" % family,
            hdrs = [
                ":device_sources",
                ":%s_sources" % family,
            ],
            archs = _GROUPED_ARCHS[family],
            tags = ["manual"],
            visibility = [
                "//native/cuda:__subpackages__",
                "//tools/roofline:__pkg__",
            ],
            defines = [
                "FV_KV=flashverify::cuda::" + _CACHE_TYPES[kv],
                "FV_KV_NAME=" + kv,
                "FV_DIM=%d" % dim,
            ],
        )
        labels.append(":" + name)
    return labels

def reviewed_images():
    """Names the images whose registers and spills are reviewed: resources.tsv.

    Returns:
      Their labels.
    """
    return [":scalar", ":cache_write", ":states"] + [
        ":%s_%s_d%d" % instance
        for instance in _grouped_instances()
        if instance[0] == "grouped_sm70"
    ]

def all_images(package):
    """Names all images, for tables outside this package.

    Args:
      package: this package, "//native/cuda".

    Returns:
      Their labels.
    """
    return [package + ":" + name for name in ["runtime", "scalar", "cache_write", "states"]] + [
        "%s:%s_%s_d%d" % ((package,) + instance)
        for instance in _grouped_instances()
    ]
