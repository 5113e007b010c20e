"""python launch/export.py is the command `orthojax export`."""

from orthojax.commands import start

if __name__ == "__main__":
    start("export")
