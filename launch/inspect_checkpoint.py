"""python launch/inspect_checkpoint.py is the command `orthojax inspect`."""

from orthojax.commands import start

if __name__ == "__main__":
    start("inspect")
