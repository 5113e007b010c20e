"""python launch/reproduce.py is the command `orthojax reproduce`."""

from orthojax.commands import start

if __name__ == "__main__":
    start("reproduce")
