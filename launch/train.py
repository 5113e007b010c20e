"""python launch/train.py is the command `orthojax train`."""

from orthojax.commands import start

if __name__ == "__main__":
    start("train")
