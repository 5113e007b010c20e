"""python launch/generate.py is the command `orthojax generate`."""

from orthojax.commands import start

if __name__ == "__main__":
    start("generate")
