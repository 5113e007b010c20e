"""python launch/evaluate.py is the command `orthojax evaluate`."""

from orthojax.commands import start

if __name__ == "__main__":
    start("evaluate")
