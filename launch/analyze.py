"""python launch/analyze.py is the command `orthojax analyze`."""

from orthojax.commands import start

if __name__ == "__main__":
    start("analyze")
