"""python -m orthojax: the command `orthojax`."""

from orthojax.commands import main

if __name__ == "__main__":
    main()
