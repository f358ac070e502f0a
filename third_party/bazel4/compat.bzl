"""What Debian's Bazel 4.2.3 would otherwise fetch from the network."""

def bazel4_compat():
    """Declares local shims for the repositories that Bazel 4 has no copy of.

    Its built-in WORKSPACE suffix and @bazel_tools load @rules_cc and @rules_java,
    and every test rule depends on @remote_coverage_tools; the shims forward to
    the native rules. Debian's build reports no version at all. Any newer Bazel
    brings its own, so nothing is declared for it.
    """
    if native.bazel_version and not native.bazel_version.startswith("4."):
        return
    for name in ["rules_cc", "rules_java", "remote_coverage_tools"]:
        native.local_repository(
            name = name,
            path = "third_party/bazel4/" + name,
        )
