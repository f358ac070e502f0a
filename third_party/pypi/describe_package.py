"""Makes an installed package free of this machine's paths, and describes it.

Usage: describe_package.py SITE_PACKAGES, a folder that holds one package.
Prints JSON: `content` (a digest of everything installed), `needs` (the packages
it requires on this machine) and `extras` (those only an extra requires).
"""

import hashlib
import json
import pathlib
import sys
from email.parser import HeaderParser

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name


def remove_scripts(site_packages: pathlib.Path) -> None:
    """Removes console scripts: their first line is an absolute path."""
    for path in site_packages.glob("bin/*"):
        with path.open("rb") as file:
            is_script = file.read(2) == b"#!"
        if is_script:
            path.unlink()


def main(site_packages: pathlib.Path) -> None:
    """Prints the description as JSON."""
    remove_scripts(site_packages)
    (dist_info,) = site_packages.glob("*.dist-info")

    needs = set()
    extras = set()
    metadata = HeaderParser().parsestr((dist_info / "METADATA").read_text(encoding="utf-8"))
    for line in metadata.get_all("Requires-Dist") or []:
        requirement = Requirement(line)
        required = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        (needs if required else extras).add(canonicalize_name(requirement.name))

    # RECORD lists every installed file with its hash; pip writes it in no order.
    record = dist_info / "RECORD"
    lines = []
    for line in sorted(record.read_text(encoding="utf-8").splitlines()):
        name = line.rsplit(",", 2)[0].strip('"').lstrip("./")
        if not name.startswith("bin/") or (site_packages / name).exists():
            lines.append(line + "\n")
    record.write_text("".join(lines), encoding="utf-8")

    content = hashlib.sha256("".join(lines).encode()).hexdigest()
    print(json.dumps({"content": content, "needs": sorted(needs), "extras": sorted(extras)}))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
