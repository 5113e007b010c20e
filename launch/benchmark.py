"""python launch/benchmark.py is the command `orthojax benchmark`."""

from orthojax.commands import start

if __name__ == "__main__":
    start("benchmark")
