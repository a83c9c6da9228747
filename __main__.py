"""`python -m evenrank`, the same as the command `evenrank`; torchrun starts it so on every rank."""

from evenrank.cli.main import main

if __name__ == "__main__":
    main()
