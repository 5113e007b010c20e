"""python launch/prepare_data.py is the command `orthojax prepare`."""

from orthojax.commands import start

if __name__ == "__main__":
    start("prepare")
