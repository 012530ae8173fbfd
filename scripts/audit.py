"""Known vulnerabilities of installed packages: `make audit`.

    python scripts/audit.py pip-audit [ARGUMENT ...]

pip-audit skips packages that its database does not know, and succeeds if it skips all, as with an
index that has packages and no advisories. This script prints how many packages were looked up, and
ends with 1 if one has a known vulnerability, or a published one was not found.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec

OWN = "rootlace"


def report(found: dict[str, Any]) -> tuple[list[str], bool]:
    """Return pip-audit's JSON line by line, and whether every published package was looked up and
    none has a known vulnerability."""
    every = [one for one in found["dependencies"] if not one["name"].startswith(OWN)]
    known = [one for one in every if "skip_reason" not in one]
    # A version with a "+" is a private build, which no database has.
    missed = [one for one in every if "+" not in one.get("skip_reason", "+")]
    lines = [f"{len(known)} of {len(every)} packages were looked up"]
    for one in known:
        for fault in one["vulns"]:
            mended = ", ".join(fault["fix_versions"]) or "no version"
            lines.append(f"{one['name']} {one['version']}: {fault['id']}, mended in {mended}")
    if missed:
        names = ", ".join(one["name"] for one in missed)
        lines.append(f"the database has nothing about {len(missed)}: {names}")
    if every and not known:
        lines.append("NOTHING WAS AUDITED: the index that pip is set to serves no advisories")
    return lines, bool(known) and not missed and not any(one["vulns"] for one in known)


def main(command: list[str]) -> int:
    options = ["--format", "json", "--progress-spinner", "off"]
    done = subprocess.run([*command, *options], stdout=subprocess.PIPE, check=False)
    if not done.stdout.strip():
        print("pip-audit found nothing out", file=sys.stderr)
        return 1
    lines, good = report(msgspec.json.decode(done.stdout))
    print("\n".join(lines))
    return not good


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
