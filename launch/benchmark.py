"""python launch/benchmark.py runs all benchmarks on whatever device is there; --json prints one JSON object of each.

On a GPU variants of a training step follow, as lines of JSON, in up to ten minutes.
"""

import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    folder = Path(__file__).resolve().parents[1] / "benchmarks"
    for name in ("attention", "optimizer", "training", "loop"):  # one process each, so that its memory is freed
        subprocess.run([sys.executable, str(folder / f"{name}.py"), *sys.argv[1:]], check=True)
    if "--tiny" not in sys.argv:
        subprocess.run([sys.executable, str(folder / "gpu_step.py")], check=True)
