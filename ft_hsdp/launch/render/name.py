"""The job's name as Kubernetes allows it: a DNS label (RFC 1035) with room for what is added to it."""

from __future__ import annotations

import re

from ft_hsdp.errors import ConfigError

LONGEST = 42  # a pod's name is a label, too: 63 without "-lighthouse-0-0-abcde"


def label(name: str) -> str:
    """`name` in lower case, with a dash for what a label may not have, and a letter first.

    Raises ConfigError on job.name where that is too long, or nothing is left.
    """
    made = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if made and not made[0].isalpha():
        made = f"job-{made}"
    if not 0 < len(made) <= LONGEST:
        allowed = f"a name of which Kubernetes can make a label of 1 to {LONGEST} letters, digits and dashes"
        raise ConfigError("job.name", name, allowed)
    return made
