"""``python -m qkit.cli``: the same as ``qkit``; how a supervisor starts its workers."""

from qkit.cli import main

if __name__ == "__main__":
    main()
