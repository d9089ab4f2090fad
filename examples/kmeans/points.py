"""Writes the points of the k-means example: 65,536 points of 32 numbers from 0 to 255, around 20 places.

python examples/kmeans/points.py FILE
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

POINTS, DIMENSIONS, CLUSTERS = 65_536, 32, 20


def main() -> None:
    """Write the file."""
    random = np.random.default_rng(1)
    places = random.uniform(40, 215, (CLUSTERS, DIMENSIONS))
    points = places[random.integers(CLUSTERS, size=POINTS)] + random.normal(0, 25, (POINTS, DIMENSIONS))
    file = Path(sys.argv[1])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(points.clip(0, 255).astype(np.uint8).tobytes())


if __name__ == "__main__":
    main()
